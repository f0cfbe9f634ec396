#!/usr/bin/env python3
"""What tiering costs and how fast it is, from a write to osiris to a durable manifest; started by `make bench-path`.

A stream is written to as fast as its writer goes, with the application and without, in turns; then at a rate at which nothing is
scarce, while the store is away. Each run is a VM of its own. While the store is away a VM with the application and one without write
in turns of ten seconds, and the other one is stopped (SIGSTOP): what a machine does beside lasts for minutes, moves a p99 by half, and
must not fall on one of them alone. Two VMs without the application do the same, which tells what is left of that. The store is the
sink of `make bench-upload`, which throws large bodies away, so that what is measured is this side. Writes target/bench/path.json and
path.svg, prints tables.
Environment: BENCH_ROUNDS (3), BENCH_GIB (2; written by each run at full rate), BENCH_OUTAGE_S (60; for so long each VM writes; 0
leaves the outages out), BENCH_OUTAGE_ROUNDS (2), BENCH_OUTAGE_MIB_S (40), BENCH_TMP (where logs lie: /dev/shm where it has room, so
that no disk decides; else TMPDIR).
"""

import http.server
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_upload import FLAVOUR, ROOT, TARGET, certificates, say  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
GIB = int(os.environ.get("BENCH_GIB", "2"))
OUTAGE_S = int(os.environ.get("BENCH_OUTAGE_S", "60"))
OUTAGE_ROUNDS = int(os.environ.get("BENCH_OUTAGE_ROUNDS", "2"))
OUTAGE_RATE = int(os.environ.get("BENCH_OUTAGE_MIB_S", "40")) << 20

WITHOUT, WITH = "without", "with"
REFUSED, BLACK_HOLE, BUSY = "refused", "black hole", "503"

TURN_S = 10
# What has piled up in a VM while it was stopped is not the doing of the store.
SETTLE_S = 0.5
PATIENCE_S = 120


def main():
    work = Path(tempfile.mkdtemp(prefix="stream_s3_bench.", dir=place()))
    try:
        full = full_rate(work)
        outages = store_away(work) if OUTAGE_S > 0 else {}
        report(full, outages)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def place():
    """Where logs lie; None is the usual place for temporary files."""
    shm, wanted = Path("/dev/shm"), 2 * max(GIB * 2**30, OUTAGE_RATE * OUTAGE_S)
    if "BENCH_TMP" in os.environ:
        return os.environ["BENCH_TMP"]
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > wanted else None


def full_rate(work):
    certificates(work)
    peer = str(TARGET / "release" / "examples" / "bench_peer")
    sink = subprocess.Popen([peer, "sink", str(work / "cert.pem"), str(work / "key.pem")],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://localhost:{sink.stdout.readline().split()[0]}"
        found = {WITHOUT: [], WITH: []}
        for number in range(ROUNDS + 1):  # the first one warms up
            for way, store in ((WITHOUT, "none"), (WITH, url)):
                run = vm(work, store, int(GIB * 2**30), rate=0, settle=True)
                if number > 0:
                    found[way].append(run)
                say(f"round {number}/{ROUNDS} {way}: {mib_s(run):.0f} MiB/s written, {run['cpu']:.1f} CPU s")
        return found
    finally:
        sink.stdin.close()
        sink.wait(10)


def store_away(work):
    refused, silent = closed_port(), socket.create_server(("127.0.0.1", 0), backlog=128)
    busy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=busy.serve_forever, daemon=True).start()
    url = "http://127.0.0.1:{}".format
    ways = ((WITHOUT, "none"), (REFUSED, url(refused)), (BLACK_HOLE, url(silent.getsockname()[1])),
            (BUSY, url(busy.server_address[1])))
    found = {way: [] for way, _ in ways}
    for number in range(1, OUTAGE_ROUNDS + 1):
        for way, store in ways:
            both = pair(work, store, other_first=number % 2 == 0)
            control, run = both
            found[way].append(both)
            say(f"store away, round {number}: {way}: p99 {run['write_p99_ms']:.3f} ms beside {control['write_p99_ms']:.3f} without;"
                f" turns: {turns(run)} beside {turns(control)}")
    busy.shutdown()
    silent.close()
    return found


def turns(run):
    return " ".join(f"{p99:.2f}" for p99 in run["turns_p99_ms"])


def pair(work, store, other_first):
    """What a VM without the application found, and one with it, in turns. Which one is started first may matter, so that changes, too."""
    count = max(1, OUTAGE_S // TURN_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        vms = []
        try:
            both = (("without", "none"), ("with", store))
            for name, url in reversed(both) if other_first else both:
                vms.append(TurnTaker(work / name, url, server, count))
            for number in range(count):
                for one in vms if number % 2 == 0 else reversed(vms):
                    one.turn()
            found = [one.result() for one in vms]
            return found[::-1] if other_first else found
        finally:
            for one in vms:
                one.end()


class TurnTaker:
    """A VM that writes while it is asked to, and is stopped otherwise."""

    def __init__(self, place, store, server, count):
        self.place = place
        variables = variables_of(place, store, OUTAGE_RATE * OUTAGE_S, OUTAGE_RATE, settle=False)
        variables |= {"BENCH_TURNS": str(count), "BENCH_PORT": str(server.getsockname()[1])}
        self.process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, process_group=0,
                                        env={**os.environ, **variables})
        try:
            server.settimeout(PATIENCE_S)
            self.connection, _ = server.accept()
        except BaseException:
            self.kill()
            raise
        self.connection.settimeout(TURN_S + PATIENCE_S)
        self.signal(signal.SIGSTOP)

    def signal(self, which):
        os.killpg(self.process.pid, which)

    def turn(self):
        self.signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        self.connection.sendall(b"go")
        if self.connection.recv(4, socket.MSG_WAITALL) != b"done":
            raise RuntimeError("a VM has ended before its turn did")
        self.signal(signal.SIGSTOP)

    def result(self):
        self.signal(signal.SIGCONT)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return json.loads(out.strip().splitlines()[-1])

    def end(self):
        self.connection.close()
        self.kill()

    def kill(self):
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


class Busy(http.server.BaseHTTPRequestHandler):
    """Answers as soon as it knows that there is a request, as a load balancer without a server behind it does."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    do_PUT = do_GET = do_DELETE = do_POST = do_HEAD = answer

    def log_message(self, *_arguments):
        pass


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


COMMAND = [str(ROOT / ".ci" / "erl"), FLAVOUR, "stream_s3_bench_path", "run"]


def variables_of(place, store, size, rate, settle):
    return {"BENCH_DIR": str(place), "BENCH_STORE": store, "BENCH_BYTES": str(size), "BENCH_RATE": str(rate),
            "BENCH_SETTLE": "yes" if settle else "no"}


def vm(work, store, size, rate, settle):
    place = work / "log"
    try:
        variables = variables_of(place, store, size, rate, settle)
        out = subprocess.run(COMMAND, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}).stdout
        return json.loads(out.strip().splitlines()[-1])
    finally:
        shutil.rmtree(place, ignore_errors=True)


def mib_s(run, seconds="write_seconds"):
    return run["bytes"] / 2**20 / run[seconds]


def spread(values):
    values = list(values)
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def report(full, outages):
    gib = full[WITH][0]["bytes"] / 2**30
    tiering = [with_["cpu"] - without["cpu"] for with_, without in zip(full[WITH], full[WITHOUT])]
    statuses = sum(run["statuses"] for run in full[WITH])
    result = {
        "rounds": ROUNDS,
        "gib": gib,
        "written_mib_s": {way: spread(mib_s(run) for run in runs) for way, runs in full.items()},
        "durable_mib_s": spread(mib_s(run, "total_seconds") for run in full[WITH]),
        "commit_to_durable_p50_ms": spread(run["durable_p50_ms"] for run in full[WITH]),
        "commit_to_durable_p99_ms": spread(run["durable_p99_ms"] for run in full[WITH]),
        "cpu_s_per_gib": {**{way: spread(run["cpu"] / gib for run in runs) for way, runs in full.items()},
                          "tiering": spread(cpu / gib for cpu in tiering)},
        "write_p99_ms": {way: spread(run["write_p99_ms"] for run in runs) for way, runs in full.items()},
        "rss_mib": {way: spread(run["rss_mib"] for run in runs) for way, runs in full.items()},
        "drain": {"looks": statuses, "waiting": sum(run["waiting"] for run in full[WITH]),
                  "waiting_below_max_in_flight_fragments": sum(run["waiting_below_max"] for run in full[WITH]),
                  "in_flight_max": max(run["in_flight_max"] for run in full[WITH]),
                  "lag_mib_max": round(max(run["lag_mib_max"] for run in full[WITH]), 1)},
        "store_away": away(outages),
    }
    out = TARGET / "bench"
    out.mkdir(parents=True, exist_ok=True)
    (out / "path.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "path.svg").write_text(svg(result))
    tell(result)
    print(f"\n{out / 'path.json'}, {out / 'path.svg'}")


def away(outages):
    if not outages:
        return None
    ratios = {way: spread(run["write_p99_ms"] / control["write_p99_ms"] for control, run in runs) for way, runs in outages.items()}
    # Turns that follow each other, so that something that falls on one of them is one value of many.
    by_turn = {way: [ours / alone for control, run in runs for alone, ours in zip(control["turns_p99_ms"], run["turns_p99_ms"])]
               for way, runs in outages.items()}
    by_turn = {way: spread(values) for way, values in by_turn.items()}
    # Which of two VMs without the application is called the other one is chance.
    same = by_turn[WITHOUT]["median"]
    limit = max(1.05, same, 1 / same)
    stores = (REFUSED, BLACK_HOLE, BUSY)
    return {
        "seconds": OUTAGE_S, "mib_s": OUTAGE_RATE >> 20, "ratio": ratios, "limit": round(limit, 3),
        "turn_seconds": TURN_S, "turn_ratio": by_turn,
        "write_p99_ms": {way: {"without": spread(control["write_p99_ms"] for control, _ in runs),
                               "with": spread(run["write_p99_ms"] for _, run in runs)} for way, runs in outages.items()},
        "within": {way: by_turn[way]["median"] <= limit for way in stores},
        "rss_mib": {way: spread(run["rss_mib"] for _, run in runs) for way, runs in outages.items()},
        "cpu_s": {way: {"without": spread(control["cpu"] for control, _ in runs),
                        "with": spread(run["cpu"] for _, run in runs)} for way, runs in outages.items()},
        "lag_mib_max": {way: round(max(run["lag_mib_max"] for _, run in outages[way]), 1) for way in stores},
    }


def tell(result):
    line = lambda name, numbers: print(f"{name:44} {numbers['median']:9.3f} ({numbers['min']:.3f}..{numbers['max']:.3f})")
    print(f"\n{'at full rate, ' + format(result['gib'], '.1f') + ' GiB a run':44}    median (min..max)")
    for way in (WITHOUT, WITH):
        line(f"written, MiB/s, {way}", result["written_mib_s"][way])
    line("durable, MiB/s, from the first write to the end", result["durable_mib_s"])
    line("commit to durable, p50, ms", result["commit_to_durable_p50_ms"])
    line("commit to durable, p99, ms", result["commit_to_durable_p99_ms"])
    for way, numbers in result["cpu_s_per_gib"].items():
        line(f"CPU s/GiB, {way}", numbers)
    for way in (WITHOUT, WITH):
        line(f"write to confirm, p99, ms, {way}", result["write_p99_ms"][way])
        line(f"resident memory at most, MiB, {way}", result["rss_mib"][way])
    drain = result["drain"]
    print(f"the drain waited in {drain['waiting']} of {drain['looks']} looks, in {drain['waiting_below_max_in_flight_fragments']}"
          f" of them with fewer fragments in flight than allowed; at most {drain['in_flight_max']} in flight, {drain['lag_mib_max']} MiB behind")
    if result["store_away"]:
        away_ = result["store_away"]
        print(f"\nstore away for {away_['seconds']} s of writing, {away_['mib_s']} MiB/s: p99 of write to confirm, ms, and its ratio to that of the VM"
              f" without the application in turn with it (limit for a turn {away_['limit']})")
        for way, numbers in away_["write_p99_ms"].items():
            line(f"{way}: the VM without", numbers["without"])
            line(f"{way}: the other", numbers["with"])
            line(f"{way}: ratio", away_["ratio"][way])
            line(f"{way}: ratio of the p99 of a turn", away_["turn_ratio"][way])
        print(f"within the limit: {away_['within']}; behind at the end, MiB: {away_['lag_mib_max']}")


def svg(result):
    """Bars: CPU seconds a GiB, and the p99 of a write while the store is away; the line is the range."""
    rows = [("CPU s/GiB", way, numbers) for way, numbers in result["cpu_s_per_gib"].items()]
    if result["store_away"]:
        rows += [("p99 ms, store away", way if which == "with" else f"without, beside {way}", numbers)
                 for way, both in result["store_away"]["write_p99_ms"].items() for which, numbers in both.items()]
    parts, y = [], 30
    for title, way, numbers in rows:
        top = max(other["max"] for kind, _, other in rows if kind == title) or 1
        color = "#7f7f7f" if way.startswith("without") else "#d62728"
        x = [300 + 420 * max(0, numbers[key]) / top for key in ("median", "min", "max")]
        parts += [
            f'<text x="290" y="{y + 14}" text-anchor="end">{title}: {way}</text>',
            f'<rect x="300" y="{y}" width="{x[0] - 300:.1f}" height="18" fill="{color}"/>',
            f'<line x1="{x[1]:.1f}" x2="{x[2]:.1f}" y1="{y + 9}" y2="{y + 9}" stroke="black"/>',
            f'<text x="{x[2] + 6:.1f}" y="{y + 14}">{numbers["median"]:.3f}</text>']
        y += 26
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{y + 10}" font-family="sans-serif" font-size="13">'
            '<rect width="100%" height="100%" fill="white"/>'
            '<text x="300" y="20">from write to durable manifest (median; line: range of the rounds)</text>'
            + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    main()
