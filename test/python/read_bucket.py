#!/usr/bin/env python3
"""Reads the records of a stream out of a bucket and compares them with the ones that were written.

    read_bucket.py BUCKET_DIR PREFIX STREAM_ID RECORDS_FILE [--root EPOCH UID]

BUCKET_DIR holds the objects as plain files named by their keys. RECORDS_FILE holds the expected records in order, each a
big-endian 32-bit length and as many bytes. Prints `N records equal` and exits with 0, or prints the first difference and
exits with 1; with 2 where something is not there or not in a form this program reads.

Nothing but the standard library, and nothing shared with the uploader: the formats are taken from their description alone,
so that the same misreading does not sit on both sides.
"""

import argparse
import os
import re
import struct
import sys
import zlib

ROOT_NAME = re.compile(r"root\.(0|[1-9][0-9]*)\.([0-9a-f]{8})\.manifest")
MANIFEST_HEADER = struct.Struct(">4sIQQqq9s")
ENTRY = struct.Struct(">QqqB5sI")
CHUNK_HEADER = struct.Struct(">BBHIqQQIIIB3x")
INDEX_RECORD = struct.Struct(">QqI")
FRAGMENT_MAGIC = b"OSIF" + struct.pack(">I", 1)
GROUP_SUFFIX = {1: "group", 2: "kgroup", 3: "mgroup"}
GROUP_MAGIC = {1: b"OSIG", 2: b"OSIK", 3: b"OSIM"}
FRAGMENT, USER_CHUNK = 0, 0


class Unreadable(Exception):
    """The bucket, or the file of records, is not what it should be."""


class Manifest:
    """A decoded root or group: header fields, and entries as tuples (first offset, first and last timestamp, kind, size, uid)."""

    def __init__(self, data, magic, name):
        if len(data) < MANIFEST_HEADER.size or (len(data) - MANIFEST_HEADER.size) % ENTRY.size != 0:
            raise Unreadable(f"{name}: {len(data)} bytes do not make a header and whole entries")
        found, version, self.first_offset, self.next_offset, self.first_ts, self.first_last_ts, total = (
            MANIFEST_HEADER.unpack_from(data))
        if found != magic or version != 1:
            raise Unreadable(f"{name}: starts with {found!r} version {version} instead of {magic!r} version 1")
        self.total_size = int.from_bytes(total, "big")
        self.entries = []
        for offset, first_ts, last_ts, kind, size, uid in ENTRY.iter_unpack(data[MANIFEST_HEADER.size:]):
            self.entries.append((offset, first_ts, last_ts, kind, int.from_bytes(size, "big"), uid))


class Stream:
    """The objects of one stream."""

    def __init__(self, bucket, prefix, stream):
        self.base = os.path.join(bucket, *prefix.split("/"), "stream", stream)

    def read(self, *name):
        path = os.path.join(self.base, *name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from None

    def root(self, wanted):
        """The root named, or the one of the highest epoch that reaches furthest."""
        try:
            names = os.listdir(os.path.join(self.base, "metadata"))
        except OSError as error:
            raise Unreadable(f"no roots in {self.base}: {error.strerror}") from None
        found = []
        for name in names:
            match = ROOT_NAME.fullmatch(name)
            if not match or (wanted and (match[1], match[2]) != wanted):
                continue
            root = Manifest(self.read("metadata", name), b"OSIR", name)
            found.append((int(match[1]), root.next_offset, root.first_offset, name, root))
        if not found:
            raise Unreadable(f"no {'such ' if wanted else ''}root in {self.base}")
        return max(found)[-1]

    def fragments(self, entries, end, first_offset):
        """The surviving fragments below some entries that end at `end`: (first offset, end, size, name)."""
        for index, (offset, _, _, kind, size, uid) in enumerate(entries):
            until = entries[index + 1][0] if index + 1 < len(entries) else end
            if until <= first_offset:
                continue
            if kind == FRAGMENT:
                yield offset, until, size, f"{offset:020}.{uid:08x}.fragment"
                continue
            if kind not in GROUP_SUFFIX:
                raise Unreadable(f"the entry at offset {offset} is of the unknown kind {kind}")
            name = f"{offset:020}.{uid:08x}.{GROUP_SUFFIX[kind]}"
            group = Manifest(self.read("metadata", name), GROUP_MAGIC[kind], name)
            yield from self.fragments(group.entries, until, first_offset)

    def records(self, wanted):
        """All records of users, as (offset, bytes)."""
        root = self.root(wanted)
        expected = root.first_offset
        total = 0
        for first, end, size, name in self.fragments(root.entries, root.next_offset, root.first_offset):
            if first != expected:
                raise Unreadable(f"{name} starts at offset {first}, but {expected} comes next")
            yield from read_fragment(self.read("data", name), first, end, size, name)
            expected = end
            total += size
        if expected != root.next_offset:
            raise Unreadable(f"the fragments end at offset {expected}, the root at {root.next_offset}")
        if total != root.total_size:
            raise Unreadable(f"the fragments hold {total} bytes, the root says {root.total_size}")


def read_fragment(data, expected, end, size, name):
    """The records of one fragment object; checks header, chunk headers, checksums and index on the way."""
    if data[:8] != FRAGMENT_MAGIC:
        raise Unreadable(f"{name}: starts with {data[:8]!r}")
    index = b""
    position = 8
    while position < 8 + size:
        if position + CHUNK_HEADER.size > 8 + size:
            raise Unreadable(f"{name}: the data ends within the chunk header at byte {position}")
        (magic, kind, entries, records, timestamp, _epoch, chunk_id, crc, data_size, trailer_size, filter_size) = (
            CHUNK_HEADER.unpack_from(data, position))
        if magic != 0x50:
            raise Unreadable(f"{name}: no chunk at byte {position}")
        if chunk_id != expected:
            raise Unreadable(f"{name}: chunk {chunk_id} at byte {position}, but {expected} comes next")
        start = position + CHUNK_HEADER.size + filter_size
        payload = data[start:start + data_size]
        if zlib.crc32(payload) != crc:
            raise Unreadable(f"{name}: the data of chunk {chunk_id} does not fit its CRC")
        index += INDEX_RECORD.pack(chunk_id, timestamp, position - 8)
        if kind == USER_CHUNK:
            yield from read_chunk(payload, entries, chunk_id, records, name)
        expected = chunk_id + records
        position = start + data_size + trailer_size
    if position != 8 + size:
        raise Unreadable(f"{name}: the last chunk ends at byte {position}, the data at {8 + size}")
    if expected != end:
        raise Unreadable(f"{name}: ends at offset {expected}, but {end} comes next")
    if data[position:] != index:
        raise Unreadable(f"{name}: the index does not fit the chunks")


def read_chunk(payload, entries, chunk_id, records, name):
    """The records in the data part of a chunk."""
    where = f"{name}: chunk {chunk_id}"
    offset, position = chunk_id, 0
    for _ in range(entries):
        if payload[position:position + 1] >= b"\x80":
            batch, position, in_batch = read_batch(payload, position, where)
            inner = 0
            for _ in range(in_batch):
                record, inner = read_simple(batch, inner, where)
                yield offset, record
                offset += 1
            if inner != len(batch):
                raise Unreadable(f"{where}: a batch of {in_batch} records has {len(batch) - inner} bytes too many")
        else:
            record, position = read_simple(payload, position, where)
            yield offset, record
            offset += 1
    if position != len(payload) or offset != chunk_id + records:
        raise Unreadable(f"{where}: {entries} entries hold {offset - chunk_id} records in {position} bytes, "
                         f"the header says {records} in {len(payload)}")


def read_simple(data, position, where):
    """An entry of one record: a zero bit, 31 bits of length, the record."""
    if position + 4 > len(data):
        raise Unreadable(f"{where}: ends within an entry")
    (length,) = struct.unpack_from(">I", data, position)
    end = position + 4 + length
    if length >= 1 << 31 or end > len(data):
        raise Unreadable(f"{where}: a record of {length} bytes does not fit")
    return data[position + 4:end], end


def read_batch(data, position, where):
    """An entry of many records: a one bit, 3 bits of compression, 4 unused, u16 records, u32 plain length, u32 stored length."""
    if position + 11 > len(data):
        raise Unreadable(f"{where}: ends within a batch header")
    flags, records, plain, stored = struct.unpack_from(">BHII", data, position)
    compression = flags >> 4 & 7
    if compression != 0:
        raise Unreadable(f"{where}: holds a compressed batch (type {compression}), which this program does not read")
    end = position + 11 + stored
    if plain != stored or end > len(data):
        raise Unreadable(f"{where}: a plain batch of {stored} bytes ({plain} unpacked) does not fit")
    return data[position + 11:end], end, records


def expected_records(path):
    """The records that were written, in order."""
    try:
        with open(path, "rb") as file:
            while head := file.read(4):
                length = int.from_bytes(head, "big")
                record = file.read(length) if len(head) == 4 else b""
                if len(head) < 4 or len(record) < length:
                    raise Unreadable(f"{path}: ends within a record")
                yield record
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None


def shown(record):
    """The beginning of a record, for a message."""
    return f"{record[:40]!r}{'...' if len(record) > 40 else ''} ({len(record)} bytes)"


def compare(stored, expected):
    """Says how many records are equal, or what the first difference is: (equal, message)."""
    count = 0
    for offset, record in stored:
        wanted = next(expected, None)
        if wanted is None:
            return False, f"record {count} (offset {offset}): {shown(record)} was never written"
        if record != wanted:
            return False, f"record {count} (offset {offset}): {shown(record)} instead of {shown(wanted)}"
        count += 1
    wanted = next(expected, None)
    if wanted is not None:
        return False, f"record {count}: {shown(wanted)} is not in the bucket, which ends before it"
    return True, f"{count} records equal"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bucket", metavar="BUCKET_DIR")
    parser.add_argument("prefix", metavar="PREFIX")
    parser.add_argument("stream", metavar="STREAM_ID")
    parser.add_argument("records", metavar="RECORDS_FILE")
    parser.add_argument("--root", nargs=2, metavar=("EPOCH", "UID"), help="this root instead of the newest")
    options = parser.parse_args(arguments)
    stream = Stream(options.bucket, options.prefix, options.stream)
    try:
        equal, message = compare(
            stream.records(tuple(options.root) if options.root else None), expected_records(options.records))
    except Unreadable as error:
        print(f"read_bucket: {error}", file=sys.stderr)
        return 2
    print(message)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
