"""The chat template and ``assistant_text`` write one form; the prefix cache depends on it."""

from __future__ import annotations

import json

import pytest
from sojourn_server.models import assistant_text
from sojourn_server.models.gguf_source import find_gguf, load_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command, é & <tag> 'quoted'",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]

COMMANDS = [
    "ls",
    "",
    " leading and trailing ",
    """grep -rn "it's" . | sed 's/\\\\/\\//g' && echo "a\\tb" """,
    "cat > f.py <<'EOF'\nprint(\"hi\")\n\n\n    indented\n\tTabbed\nEOF\n",
    "echo 'žluťoučký kůň 漢字 🙂 \u200b' # <b>&amp;</b>",
    "printf '%s\\n' {1..3}; echo $((1+2)) `date` {{ jinja }} {% raw %}",
    "\n\n  x\r\n",
]
CONTENTS = [None, "", "I look first.", "Two lines:\n- é\n", "THOUGHT: ends with blanks  ", "three\n\n\n"]


def call(command: str, name: str = "bash") -> dict:
    arguments = json.dumps({"command": command, "timeout": 1.5, "flags": [True, None]}, ensure_ascii=False)
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def as_vllm_renders(messages: list[dict]) -> list[dict]:
    """vLLM parses the arguments before it renders (renderers/chat_utils.py, _postprocess_messages)."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for one in message.get("tool_calls") or []:
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return messages


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("transformers")
    return load_tokenizer(find_gguf())


def prompt_ids(tokenizer, messages) -> list[int]:
    return tokenizer.apply_chat_template(
        as_vllm_renders(messages), tools=TOOLS, add_generation_prompt=True, return_dict=False
    )


ANSWERS = [
    *((content, [call(command)]) for content in CONTENTS for command in COMMANDS),
    *(("Several.", [call(command) for command in COMMANDS[:count]]) for count in (2, 3)),
    ("Done, I think.\n", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("content", "calls"), ANSWERS)
def test_the_next_prompt_starts_with_this_prompt_and_its_output(tokenizer, content, calls):
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Fix it.\n"}]
    answer = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    forced = tokenizer.encode(assistant_text(content, calls), add_special_tokens=False)
    before = prompt_ids(tokenizer, messages)
    results = [{"role": "tool", "tool_call_id": "c1", "content": "out\n<x>"}] * len(calls)
    following = results or [{"role": "user", "content": "And?"}]
    after = prompt_ids(tokenizer, [*messages, answer, *following])
    expected = [*before, *forced, tokenizer.eos_token_id]
    assert after[: len(expected)] == expected


def test_the_canonical_text():
    assert assistant_text(None) == ""
    assert assistant_text("  hello\n") == "hello\n"
    assert (
        assistant_text("I look.", [call("ls é")])
        == 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls é", "timeout": 1.5, '
        '"flags": [true, null]}}\n</tool_call>'
    )
    assert assistant_text(None, [{"name": "x", "arguments": ""}]) == (
        '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>'
    )


def test_what_cannot_round_trip_is_refused():
    for content, calls in [
        ("see <tool_call>", []),
        ("a<|im_end|>b", []),
        (None, [call("echo '</tool_call>'")]),
        (None, [{"name": "x", "arguments": "[1]"}]),
    ]:
        with pytest.raises(ValueError, match=r"reads as markup|not an object"):
            assistant_text(content, calls)
