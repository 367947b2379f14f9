"""Floods a server with events until it is killed, over eight connections in batches of 1,000 events.

A connection sends its next batch when the last one is answered. Prints a line at each connection's first
answer.

    python event_flood_client.py PORT KEY
"""

from __future__ import annotations

import asyncio
import json
import sys

CONNECTIONS = 8
BATCH_EVENTS = 1000


def batch(number: int, key: str) -> bytes:
    """A request with one event for each of ``BATCH_EVENTS`` programs."""
    common = {"type": "tool_start", "tool": "bash"}
    events = [
        {**common, "program_id": f"flood{number}-{n}", "seq": n, "call_id": f"c{n}"}
        for n in range(BATCH_EVENTS)
    ]
    body = json.dumps({"v": 1, "emitter": f"flood{number}", "events": events}).encode()
    head = f"POST /sojourn/v1/events HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


async def flood(port: int, key: str, number: int) -> None:
    """Flood over one connection, and open it again whenever it is closed."""
    sent = batch(number, key)
    answered = False
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                writer.write(sent)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                if not answered:
                    print(number, flush=True)
                answered = True
        except (OSError, asyncio.IncompleteReadError):
            writer.close()


async def main() -> None:
    """Flood over all connections at once."""
    await asyncio.gather(*(flood(int(sys.argv[1]), sys.argv[2], number) for number in range(CONNECTIONS)))


if __name__ == "__main__":
    asyncio.run(main())
