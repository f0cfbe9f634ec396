#!/usr/bin/env python3
"""Writes docs/cost.svg and prints the table of docs/cost.md; started by `make bench-cost`, which builds what it needs.

Counts are measured; dollars are counts times prices. Environment: COST_FRAGMENTS_MIB (4,16,64), COST_INTERVALS_MS (500,2000,10000), COST_MIB
(256; written for each combination), COST_MIB_S (16), PRICE_PUT and PRICE_GET (dollars for 1000 requests; LIST costs as PUT, DELETE nothing),
PRICE_GB_MONTH.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"COST_FRAGMENTS_MIB": "4,16,64", "COST_INTERVALS_MS": "500,2000,10000", "COST_MIB": "256", "COST_MIB_S": "16"}
PUT = float(os.environ.get("PRICE_PUT", "0.005"))
GET = float(os.environ.get("PRICE_GET", "0.0004"))
GB_MONTH = float(os.environ.get("PRICE_GB_MONTH", "0.023"))
GIB = 1024 ** 3 / 1e9


def main():
    environment = {**DEFAULTS, **os.environ}
    flavour = environment.get("FLAVOUR", "default")
    run = subprocess.run([ROOT / ".ci" / "erl", flavour, "stream_s3_bench_cost", "main"], env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(run.returncode)
    rows = [row(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("{")]
    print("| fragment | persist interval | PUT a GiB | GET a GiB | LIST a GiB | deletions a GiB | dollars for requests, 1000 GiB |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for it in rows:
        print(f"| {it['fragment_mib']} MiB | {it['interval_ms'] / 1000:g} s | {it['put']:.0f} | {it['get']:.0f} | {it['list']:.0f} "
              f"| {it['deletions']:.0f} | {1000 * it['dollars']:.2f} |")
    print(f"\nstorage of 1000 GiB for a month: {1000 * GIB * GB_MONTH:.2f} dollars")
    (ROOT / "docs" / "cost.svg").write_text(svg(rows))
    print("docs/cost.svg")


def row(counted):
    """Counts of one GiB, and what they cost."""
    share = 1024 / counted["mib"]
    a_gib = {op: counted[op] * share for op in ("put", "get", "list")}
    a_gib["deletions"] = (counted["delete"] + counted["multi_delete"]) * share
    dollars = ((a_gib["put"] + a_gib["list"]) * PUT + a_gib["get"] * GET) / 1000
    return {**counted, **a_gib, "dollars": dollars}


def svg(rows):
    """Bars: dollars for the requests of 1000 GiB."""
    top = max(it["dollars"] for it in rows)
    parts, y = [], 30
    for it in rows:
        width = 380 * it["dollars"] / top
        parts += [
            f'<text x="210" y="{y + 14}" text-anchor="end">{it["fragment_mib"]} MiB, every {it["interval_ms"] / 1000:g} s</text>',
            f'<rect x="220" y="{y}" width="{width:.1f}" height="18" fill="#d62728"/>',
            f'<text x="{226 + width:.1f}" y="{y + 14}">{1000 * it["dollars"]:.2f}</text>']
        y += 26
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{y + 10}" font-family="sans-serif" font-size="13">'
            '<rect width="100%" height="100%" fill="white"/>'
            '<text x="220" y="20">Dollars for the requests of 1000 GiB, by fragment size and persist interval</text>'
            + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    main()
