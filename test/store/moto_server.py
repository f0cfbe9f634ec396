#!/usr/bin/env python3
"""Runs moto, an S3 server written by others, until standard input ends.

Prints `moto: listening on http://127.0.0.1:PORT` when it is ready. moto is installed into a virtual environment of its own in
the cache, once; where that is impossible this says why and exits with status 3. Needs nothing but Python 3 and, the first time, a
package index.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

# A new version gets a new environment. The extra `s3` with flask is what the S3 part of `moto[server]` needs; the whole of it is
# twice as large.
VERSION = "5.2.5"
PACKAGES = [f"moto[s3]=={VERSION}", "flask>=3,<4", "flask-cors>=5,<7"]
CANNOT = 3


def cache():
    """The folder outside the checkout, as the scripts in .ci have it."""
    given = os.environ.get("STREAM_S3_CACHE")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path(os.environ.get("HOME") or "/root") / ".cache"
    return pathlib.Path(base) / "rabbitmq_stream_s3"


def cannot(why):
    print(f"moto cannot be installed: {why}", file=sys.stderr)
    sys.exit(CANNOT)


def run(*command):
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        cannot(error)
    except subprocess.CalledProcessError as error:
        cannot("".join((error.stderr or "").strip().splitlines()[-1:]) or error)


def interpreter():
    """The Python of the environment, made where it is missing."""
    base = cache()
    folder = base / f"moto-{VERSION}"
    stamp = folder / ".complete"
    if not stamp.exists():
        try:
            base.mkdir(parents=True, exist_ok=True)
            lock = open(base / "moto.lock", "w", encoding="utf-8")
        except OSError as error:
            cannot(error)
        # Others that came first are waited for.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            run(sys.executable, "-m", "venv", str(folder))
            run(str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", "--timeout", "15", *PACKAGES)
            stamp.touch()
        lock.close()
    return folder / "bin/python"


def serve():
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"moto: listening on http://{host}:{port}", flush=True)
    sys.stdin.read()
    # Requests that are under way are nobody's any more.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        python = interpreter()
        os.execv(python, [str(python), __file__, "serve"])
