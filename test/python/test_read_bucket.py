"""Tests of read_bucket.py on buckets made here, byte by byte: python3 -m unittest discover test/python"""

import contextlib
import io
import os
import struct
import tempfile
import unittest
import zlib

import read_bucket

STREAM = "demo_1700000000"


def simple(record):
    return struct.pack(">I", len(record)) + record


def batch(records, compression=0):
    data = b"".join(map(simple, records))
    return struct.pack(">BHII", 0x80 | compression << 4, len(records), len(data), len(data)) + data


def chunk(chunk_id, entries, records, kind=0, trailer=b"", bloom=b"\0" * 16):
    data = b"".join(entries)
    header = struct.pack(">BBHIqQQIIIB3x", 0x50, kind, len(entries), records, 1000 + chunk_id, 1, chunk_id,
                         zlib.crc32(data), len(data), len(trailer), len(bloom))
    return chunk_id, header + bloom + data + trailer


def fragment(chunks):
    data = b"".join(raw for _, raw in chunks)
    index, position = b"", 0
    for chunk_id, raw in chunks:
        index += struct.pack(">QqI", chunk_id, 1000 + chunk_id, position)
        position += len(raw)
    return b"OSIF\0\0\0\1" + data + index, len(data)


def entry(offset, size, uid, kind=0):
    return struct.pack(">QqqB", offset, 1000 + offset, 1000 + offset, kind) + size.to_bytes(5, "big") + struct.pack(">I", uid)


def manifest(magic, first, following, total, entries):
    return (magic + struct.pack(">IQQqq", 1, first, following, 1000 + first, 1000 + first)
            + total.to_bytes(9, "big") + b"".join(entries))


class ReadBucket(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bucket = folder.name
        self.records = [b"first", b"", b"x" * 300, b"in a batch", b"in a batch too", b"last"]
        one, self.one_size = fragment([
            chunk(0, [b"tracking"], 1, kind=2, trailer=b"t" * 9),
            chunk(1, [simple(record) for record in self.records[:3]], 3),
        ])
        two, self.two_size = fragment([chunk(4, [batch(self.records[3:5]), simple(self.records[5])], 3, bloom=b"")])
        self.put("data/00000000000000000000.0000000a.fragment", one)
        self.put("data/00000000000000000004.0000000b.fragment", two)
        self.entries = [entry(0, self.one_size, 10), entry(4, self.two_size, 11)]
        self.put_root("1.0000000c", 0, self.entries)

    def path(self, name):
        return os.path.join(self.bucket, "some", "prefix", "stream", STREAM, *name.split("/"))

    def put(self, name, data):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(data)

    def put_root(self, name, first, entries, total=None):
        total = self.one_size + self.two_size if total is None else total
        self.put(f"metadata/root.{name}.manifest", manifest(b"OSIR", first, 7, total, entries))

    def run_on(self, records, *more):
        path = os.path.join(self.bucket, "records")
        with open(path, "wb") as file:
            file.write(b"".join(map(simple, records)))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = read_bucket.main([self.bucket, "some/prefix", STREAM, path, *more])
        return status, out.getvalue() + err.getvalue()

    def test_equal_records_are_counted(self):
        self.assertEqual(self.run_on(self.records), (0, "6 records equal\n"))

    def test_another_record_is_shown(self):
        status, text = self.run_on([*self.records[:4], b"other", self.records[5]])
        self.assertEqual(status, 1)
        self.assertIn("record 4 (offset 5): b'in a batch too' (14 bytes) instead of b'other' (5 bytes)", text)

    def test_missing_and_surplus_records_differ(self):
        self.assertEqual(self.run_on([*self.records, b"more"])[0], 1)
        self.assertEqual(self.run_on(self.records[:-1])[0], 1)

    def test_fragments_in_groups_are_found(self):
        self.put("metadata/00000000000000000000.0000000d.group", manifest(b"OSIG", 0, 0, 0, self.entries))
        self.put("metadata/00000000000000000000.0000000e.kgroup", manifest(b"OSIK", 0, 0, 0, [entry(0, 0, 13, 1)]))
        self.put_root("2.0000000f", 0, [entry(0, 0, 14, 2)])
        self.assertEqual(self.run_on(self.records), (0, "6 records equal\n"))

    def test_fragments_below_the_first_offset_are_skipped(self):
        self.put("metadata/00000000000000000000.0000000d.group", manifest(b"OSIG", 0, 0, 0, self.entries))
        self.put_root("2.0000000f", 4, [entry(0, 0, 13, 1)], self.two_size)
        os.remove(self.path("data/00000000000000000000.0000000a.fragment"))
        self.assertEqual(self.run_on(self.records[3:]), (0, "3 records equal\n"))

    def test_the_root_of_the_highest_epoch_is_read_unless_another_is_named(self):
        self.put_root("2.0000000f", 4, self.entries[1:], self.two_size)
        self.assertEqual(self.run_on(self.records[3:]), (0, "3 records equal\n"))
        self.assertEqual(self.run_on(self.records, "--root", "1", "0000000c"), (0, "6 records equal\n"))

    def test_damage_is_an_error(self):
        for byte in (0, 8, 23, 39, 100, -1):
            path = self.path("data/00000000000000000000.0000000a.fragment")
            with open(path, "rb") as file:
                whole = file.read()
            damaged = bytearray(whole)
            damaged[byte] ^= 1
            self.put("data/00000000000000000000.0000000a.fragment", damaged)
            with self.subTest(byte=byte):
                self.assertEqual(self.run_on(self.records)[0], 2)
            self.put("data/00000000000000000000.0000000a.fragment", whole)

    def test_a_compressed_batch_is_named(self):
        two, size = fragment([chunk(4, [batch(self.records[3:5], compression=1), simple(self.records[5])], 3)])
        self.put("data/00000000000000000004.0000000b.fragment", two)
        self.put_root("1.0000000c", 0, [self.entries[0], entry(4, size, 11)], self.one_size + size)
        status, text = self.run_on(self.records)
        self.assertEqual(status, 2)
        self.assertIn("chunk 4: holds a compressed batch (type 1)", text)

    def test_an_unknown_stream_is_an_error(self):
        out = io.StringIO()
        with contextlib.redirect_stderr(out):
            self.assertEqual(read_bucket.main([self.bucket, "some/prefix", "other", "none"]), 2)
        self.assertIn("no roots", out.getvalue())


if __name__ == "__main__":
    unittest.main()
