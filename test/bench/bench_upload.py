#!/usr/bin/env python3
"""Compares ways to upload the same files to the same sink; started by `make bench-upload`, which builds what it needs.

Each run is a process of its own, so that its CPU time and memory are its own. Ways take turns within a round, so that
whatever else the machine does hits all alike. Writes target/bench/upload.json and upload.svg, prints a table.
Environment: BENCH_ROUNDS (5), BENCH_CONCURRENCY (4), BENCH_GIB (2; sent by each run).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CACHE = Path(os.environ.get("STREAM_S3_CACHE", Path.home() / ".cache" / "rabbitmq_stream_s3"))
FLAVOUR = os.environ.get("FLAVOUR", "default")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "4"))
GIB = int(os.environ.get("BENCH_GIB", "2"))
FRAGMENT_MIB = 64
FILES = 16
BOTO3 = "1.40.0"

NATIVE = "this plugin, store compares"
CHECKED = "this plugin, checks itself"
LIMIT = "limit: pread and hyper alone"
ERLANG = "Erlang: pread, crc32, gun"
PYTHON = "boto3 upload_file"
WAYS = [LIMIT, NATIVE, CHECKED, ERLANG, PYTHON]


def main():
    work = Path(tempfile.mkdtemp(prefix="stream_s3_bench."))
    try:
        certificates(work)
        peer = str(TARGET / "release" / "examples" / "bench_peer")
        sink = subprocess.Popen(
            [peer, "sink", str(work / "cert.pem"), str(work / "key.pem")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            plain, secure = sink.stdout.readline().split()
            urls = {"": f"http://localhost:{plain}", "tls_": f"https://localhost:{secure}"}
            measure(work, peer, urls)
        finally:
            sink.stdin.close()
            sink.wait(10)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def certificates(work):
    """An authority, and a certificate of the sink: not every TLS library takes one for both."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    run = lambda *arguments: subprocess.run(["openssl", "req", "-x509", *key, *arguments], check=True, capture_output=True, cwd=work)
    run("-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    run("-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "key.pem", "-out", "cert.pem")


def measure(work, peer, urls):
    python = boto3_python()
    small = files(work / "small", FRAGMENT_MIB, FILES)
    times = max(1, GIB * 1024 // (FRAGMENT_MIB * FILES))
    runs = {transport: {way: [] for way in WAYS} for transport in urls}
    for number in range(ROUNDS + 1):  # the first one warms up
        for transport, url in urls.items():
            for way in WAYS:
                if way == PYTHON and python is None:
                    continue
                run = run_one(way, work, small, times, peer, python, url)
                if number > 0:
                    runs[transport][way].append(run)
                say(f"round {number}/{ROUNDS} {transport or 'plain'} {way}: {run['cpu_per_gib']:.3f} CPU s/GiB, {run['gib_s']:.2f} GiB/s")
    memory = memory_runs(work, small, urls)
    report(runs, memory)


def memory_runs(work, small, urls):
    """Peak resident memory beyond the idle VM's, with 16 uploads at a time, MiB, by transport and size of fragment."""
    large = files(work / "large", 1024, 1)
    found = {}
    for transport, url in urls.items():
        found[transport] = {
            f"{FRAGMENT_MIB} MiB": erlang("native", small, 2, url, concurrency=16)["rss_mib"],
            "1 GiB": erlang("native", large, 16, url, concurrency=16)["rss_mib"],
        }
    return found


def run_one(way, work, dir, times, peer, python, url):
    if way == LIMIT:
        paths = sorted(str(path) for path in dir.glob("*.segment")) * times
        out = output([peer, "limit", url, str(work / "ca.pem"), str(CONCURRENCY), *paths])
    elif way == PYTHON:
        out = output([str(python), str(Path(__file__).with_name("boto3_upload.py")), url, str(work / "ca.pem"),
                      str(CONCURRENCY), str(times), str(dir)])
    else:
        function = "erlang" if way == ERLANG else "native"
        out = erlang(function, dir, times, url, probe="no" if way == CHECKED else "yes")
    gib = out["bytes"] / 2**30
    return {"cpu_per_gib": out["cpu"] / gib, "gib_s": gib / out["wall"]}


def files(dir, mib, count):
    dir.mkdir()
    call_erlang("make_files", {"BENCH_DIR": str(dir), "BENCH_MIB": str(mib), "BENCH_COUNT": str(count)})
    return dir


def erlang(function, dir, times, url, probe="yes", concurrency=CONCURRENCY):
    out = call_erlang(function, {
        "BENCH_DIR": str(dir), "BENCH_TIMES": str(times), "BENCH_URL": url, "BENCH_PROBE": probe,
        "BENCH_CA": str(dir.parent / "ca.pem"), "BENCH_CONCURRENCY": str(concurrency)})
    return json.loads(out.strip().splitlines()[-1])


def call_erlang(function, variables):
    command = [str(ROOT / ".ci" / "erl"), FLAVOUR, "stream_s3_bench_upload", function]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}).stdout


def output(command):
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def boto3_python():
    """The interpreter of an environment with boto3, made in the cache; None, with a word, where it cannot be had."""
    home = CACHE / f"boto3-{BOTO3}"
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, capture_output=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", f"boto3=={BOTO3}"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"boto3 is left out, it cannot be installed: {error}")
            return None
        (home / ".ready").touch()
    return python


def report(runs, memory):
    result = {"rounds": ROUNDS, "concurrency": CONCURRENCY, "fragment_mib": FRAGMENT_MIB, "ways": {}}
    for transport, ways in runs.items():
        middle = {way: {key: statistics.median(run[key] for run in found) for key in found[0]}
                  for way, found in ways.items() if found}
        result["ways"][transport.rstrip("_") or "plain"] = {
            way: {key: {"median": round(value, 4), "min": round(min(run[key] for run in ways[way]), 4),
                        "max": round(max(run[key] for run in ways[way]), 4)}
                  for key, value in medians.items()}
            for way, medians in middle.items()}
        result[transport + "cpu_vs_limit"] = round(middle[NATIVE]["cpu_per_gib"] / middle[LIMIT]["cpu_per_gib"], 3)
        result[transport + "cpu_vs_erlang"] = round(middle[NATIVE]["cpu_per_gib"] / middle[ERLANG]["cpu_per_gib"], 3)
        result[transport + "throughput_vs_limit"] = round(middle[NATIVE]["gib_s"] / middle[LIMIT]["gib_s"], 3)
        result[transport + "extra_rss_mib"] = max(memory[transport].values())
    result["extra_rss_mib_by_fragment"] = {key.rstrip("_") or "plain": sizes for key, sizes in memory.items()}
    out = TARGET / "bench"
    out.mkdir(parents=True, exist_ok=True)
    (out / "upload.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "upload.svg").write_text(svg(result["ways"]))
    for transport, ways in result["ways"].items():
        print(f"\n{transport:32} CPU s/GiB (min..max)        GiB/s (min..max)")
        for way, numbers in ways.items():
            print(f"{way:32} {spread(numbers['cpu_per_gib'])}    {spread(numbers['gib_s'])}")
    print()
    for key, value in result.items():
        if key not in ("ways", "rounds", "concurrency", "fragment_mib"):
            print(f"{key}: {value}")
    print(f"\n{out / 'upload.json'}, {out / 'upload.svg'}")


def spread(numbers):
    return f"{numbers['median']:6.3f} ({numbers['min']:.3f}..{numbers['max']:.3f})"


def svg(transports):
    """Bars: CPU seconds a GiB, with the range of the rounds as a line."""
    rows = [(transport, way, numbers["cpu_per_gib"]) for transport, ways in transports.items() for way, numbers in ways.items()]
    top = max(numbers["max"] for _, _, numbers in rows)
    parts, y = [], 30
    for transport, way, numbers in rows:
        color = "#d62728" if "plugin" in way else "#7f7f7f"
        x = [300 + 420 * numbers[key] / top for key in ("median", "min", "max")]
        parts += [
            f'<text x="290" y="{y + 14}" text-anchor="end">{transport}: {way}</text>',
            f'<rect x="300" y="{y}" width="{x[0] - 300:.1f}" height="18" fill="{color}"/>',
            f'<line x1="{x[1]:.1f}" x2="{x[2]:.1f}" y1="{y + 9}" y2="{y + 9}" stroke="black"/>',
            f'<text x="{x[2] + 6:.1f}" y="{y + 14}">{numbers["median"]:.3f}</text>']
        y += 26
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{y + 10}" font-family="sans-serif" font-size="13">'
            '<rect width="100%" height="100%" fill="white"/>'
            '<text x="300" y="20">CPU seconds of the client per GiB uploaded (median; line: range)</text>'
            + "".join(parts) + "</svg>\n")


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
