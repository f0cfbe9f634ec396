# Every command of the project, for people and for CI alike. The work is done by the scripts in .ci/.
# FLAVOUR is where Erlang runs: default (this machine's own, else forky, else trixie), host, forky, trixie.

SHELL := bash
FLAVOUR ?= default
FILE ?=
SEEDS ?= 20000
FROM ?= 0
TWIN ?=

# Where the commands that demo, shell and the suites start are built.
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
export STREAM_S3_S3LOCAL := $(TARGET)/release/s3local
export STREAM_S3_CLI := $(TARGET)/release/stream-s3

.DEFAULT_GOAL := help
.PHONY: help setup build dist demo shell test test-deep broker-test broker-test-deep sim sim-twins ct-file soak fuzz sanitize bench-core bench-upload bench-cost bench-path bench-streams check fmt doc clean

help: ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Makes Erlang and RabbitMQ available: this machine's own, or root folders in the cache.
	@.ci/setup

build: setup ## Builds the native library, the commands and the Erlang application (FLAVOUR=...).
	@.ci/build $(FLAVOUR)

dist: setup ## The plugin as RabbitMQ takes it: an archive for its plugins directory, in _build/dist.
	@.ci/dist

demo: build ## Uploads streams to a store and verifies each byte (STORE=, STREAMS=, MB=, KEEP=).
	@.ci/erl $(FLAVOUR) stream_s3_demo main

shell: build ## An Erlang shell with all of it on the path, and an example to start from.
	@.ci/erl --shell $(FLAVOUR) stream_s3_shell start

test: setup ## All Rust tests, all suites on the first flavour, the fast ones on the oldest Erlang too.
	@.ci/test

test-deep: setup ## The same with ignored tests, many more random cases, and all suites on every flavour.
	@.ci/test deep

broker-test: setup ## The plugin in real brokers: one node and three, and one of the oldest RabbitMQ.
	@.ci/broker-test

broker-test-deep: setup ## The same with more rounds.
	@.ci/broker-test deep

sim: ## Simulates the upload path in worlds that follow from seeds (SEEDS=, FROM=, TWIN=, HISTORY=1 for the history uploader's alone); tells the story of a violation.
	@cargo run --release --quiet -p stream_s3_sim -- --seeds $(SEEDS) --from $(FROM) --table $(if $(TWIN),--twin $(TWIN)) $(if $(HISTORY),--history-only)

sim-twins: ## Takes out each guard in turn: the simulation has to find the damage.
	@cargo run --release --quiet -p stream_s3_sim -- --twins --seeds 20000

ct-file: build ## Runs suites by file, from anywhere: FILE=some_SUITE.erl (FLAVOUR=...).
	@[[ -n "$(FILE)" ]] || { echo 'error: say which: make ct-file FILE=test/.../some_SUITE.erl' >&2; exit 1; }
	@.ci/ct $(FLAVOUR) $(FILE)

fuzz: ## Fuzzes the decoders, guided by coverage (SECONDS=60, for all of them together).
	@.ci/fuzz $(or $(SECONDS),60)

bench-core: setup ## What the core costs, in Rust and through the library, beside osiris and plain Erlang.
	@.ci/bench-core

bench-upload: build ## CPU and throughput of uploads, beside their limit, plain Erlang and boto3 (BENCH_ROUNDS=, BENCH_GIB=).
	@.ci/bench-upload $(FLAVOUR)

bench-path: build ## From a write to a durable manifest, at full rate and with the store away (BENCH_ROUNDS=, BENCH_GIB=, BENCH_OUTAGE_S=).
	@.ci/bench-path $(FLAVOUR)

bench-streams: build ## Many streams on one node: 2,000 idle ones and 100 busy ones (BENCH_IDLE=, BENCH_BUSY=, BENCH_SECONDS=).
	@.ci/bench-streams $(FLAVOUR)

bench-cost: build ## Requests and dollars a GiB, by fragment size and persist interval (COST_MIB=, PRICE_PUT=, ...).
	@FLAVOUR=$(FLAVOUR) python3 test/bench/bench_cost.py

bench-broker: setup ## What tiering costs a broker: latency of confirms, CPU and memory, with and without (BENCH_ROUNDS=, BENCH_SECONDS=).
	@.ci/bench-broker $(FLAVOUR)

soak: build ## Kills a VM that uploads with kill -9, again and again, and looks for losses (ROUNDS=).
	@.ci/erl $(FLAVOUR) stream_s3_soak main

sanitize: setup ## Suites with the native library under AddressSanitizer (FILE=, FLAVOUR=).
	@.ci/sanitize $(FLAVOUR) $(FILE)

check: setup ## Formatting, clippy, documentation, compiler warnings, xref, dialyzer.
	@.ci/check

fmt: ## Formats the Rust code.
	cargo fmt --all

doc: setup ## The documentation of the crates (target/doc) and of the Erlang modules (_build/doc).
	@.ci/doc

clean: ## Removes what was built here; the cache with the root folders stays.
	rm -rf target _build erlang/priv/*.so
