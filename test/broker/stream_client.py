#!/usr/bin/env python3
"""Publishes to a stream by RabbitMQ's stream protocol, with a client by others (rstream), and waits until each message is confirmed.

    stream_client.py PORT STREAM RECORDS_FILE plain|batch|gzip|filter

RECORDS_FILE holds the messages in order, each a big-endian 32-bit length and as many bytes. Prints `N confirmed`, or fails. The stream
must exist.
"""

import asyncio
import sys

from rstream import CompressionType, Producer, RawMessage

BATCH = 20
TIMEOUT_S = 120


def records(path):
    with open(path, "rb") as file:
        while head := file.read(4):
            yield file.read(int.from_bytes(head, "big"))


async def filter_value(message):
    """The first byte, as text."""
    body = bytes(message)
    return str(body[0] if body else 0)


class Confirmations:
    """Counts what the broker confirms; a refusal fails at once."""

    def __init__(self):
        self.count = 0
        self.refused = None
        self.changed = asyncio.Event()

    def __call__(self, status):
        if not status.is_confirmed:
            self.refused = status.response_code
        self.count += 1
        self.changed.set()

    async def wait(self, wanted):
        while self.count < wanted:
            if self.refused is not None:
                raise SystemExit(f"refused with code {self.refused}")
            await asyncio.wait_for(self.changed.wait(), TIMEOUT_S)
            self.changed.clear()


async def publish(port, stream, messages, how):
    confirmations = Confirmations()
    options = {"filter_value_extractor": filter_value} if how == "filter" else {}
    async with Producer("127.0.0.1", port=port, username="guest", password="guest", **options) as producer:
        sent = 0
        for start in range(0, len(messages), BATCH):
            batch = [RawMessage(message) for message in messages[start:start + BATCH]]
            if how in ("batch", "gzip"):
                kind = CompressionType.Gzip if how == "gzip" else CompressionType.No
                await producer.send_sub_entry(
                    stream, compression_type=kind, sub_entry_messages=batch, on_publish_confirm=confirmations)
            else:
                await producer.send_batch(stream, batch, on_publish_confirm=confirmations)
            sent += 1
        await confirmations.wait(sent if how in ("batch", "gzip") else len(messages))


def main():
    port, stream, path, how = sys.argv[1:]
    messages = list(records(path))
    asyncio.run(publish(int(port), stream, messages, how))
    print(f"{len(messages)} confirmed")


if __name__ == "__main__":
    main()
