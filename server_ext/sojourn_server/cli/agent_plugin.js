// Plugin of OpenCode and extension of Pi: reports tool calls to a sojourn server.
// `sojourn hook opencode` prints it with the command in place of SOJOURN_HOOK.
import { spawn } from "node:child_process"

const [program, ...words] = JSON.parse(process.env.SOJOURN_HOOK)

// Waits for the process, which takes some ten milliseconds, so that a call's end comes after its start.
const report = (hook) =>
  new Promise((done) => {
    const child = spawn(program, words, { stdio: ["pipe", "ignore", "ignore"] })
    child.on("error", () => done()).on("exit", () => done())
    child.stdin.on("error", () => {}).end(JSON.stringify(hook))
  })

const started = (session_id, tool_use_id, tool_name, tool_input) =>
  report({ hook_event_name: "PreToolUse", session_id, tool_use_id, tool_name, tool_input })

const ended = (session_id, tool_use_id, isError) =>
  report({ hook_event_name: isError ? "PostToolUseFailure" : "PostToolUse", session_id, tool_use_id })

// A tool that throws has no `after`: the session's next request ends it.
const opencode = () => ({
  "tool.execute.before": (call, { args }) => started(call.sessionID, call.callID, call.tool, args),
  "tool.execute.after": (call) => ended(call.sessionID, call.callID, false),
})

// Pi sends no id, so the extension adds a provider that does, with the settings of `sojourn run`.
const pi = (host) => {
  const provider = JSON.parse(process.env.SOJOURN_PI)
  let session
  host.registerProvider("sojourn", provider)
  host.on("session_start", (_, context) => {
    session = context.sessionManager.getSessionId()
    host.registerProvider("sojourn", { ...provider, headers: { "X-Session-ID": session } })
  })
  host.on("tool_call", (call) => started(session, call.toolCallId, call.toolName, call.input))
  host.on("tool_result", (call) => ended(session, call.toolCallId, call.isError))
  host.on("session_shutdown", () => report({ hook_event_name: "SessionEnd", session_id: session }))
}

export default async (host) => (host.registerProvider ? pi(host) : opencode())
