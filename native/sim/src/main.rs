//! `stream_s3_sim`: runs worlds, and tells the story of one that went wrong.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use stream_s3_sim::{
    Coverage, Finding, HISTORY_REQUIRED, HistoryTwin, Limits, REQUIRED, Report, Twin, bound, run,
    run_history, search, search_history, shrink,
};

/// Lines of a story that are shown at most.
const STORY: usize = 400;
/// From so many worlds on each kind of event has to have happened often enough.
const MILLION: u64 = 1_000_000;

/// Simulates the upload path.
#[derive(Parser)]
struct Args {
    /// How many worlds.
    #[arg(long, default_value_t = 5000)]
    seeds: u64,
    /// Seed of the first one.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Tells the story of this seed.
    #[arg(long)]
    replay: Option<u64>,
    /// Tells the story of this seed of the history uploader's world.
    #[arg(long)]
    replay_history: Option<u64>,
    /// When activity and faults end at the latest, in milliseconds of the world's time.
    #[arg(long, default_value_t = u64::MAX)]
    horizon: u64,
    /// After how many faults there are no more.
    #[arg(long, default_value_t = u64::MAX)]
    faults: u64,
    /// The guard that is taken out.
    #[arg(long)]
    twin: Option<String>,
    /// Fails where something happened too rarely, however few worlds there are.
    #[arg(long)]
    require_coverage: bool,
    /// Prints the row for the table in docs/simulation.md.
    #[arg(long)]
    table: bool,
    /// Finds the damage of every missing guard, within so many seeds each.
    #[arg(long)]
    twins: bool,
    /// Leaves out all worlds but those of the history uploader.
    #[arg(long)]
    history_only: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let twin = args.twin.as_deref().and_then(Twin::of_name);
    let of_history = args.twin.as_deref().and_then(HistoryTwin::of_name);
    if let Some(seed) = args.replay_history {
        return replay_history(seed, of_history);
    }
    if of_history.is_some() {
        return history(&args, of_history);
    }
    if let (Some(name), None) = (&args.twin, twin) {
        let mut names: Vec<&str> = Twin::ALL.iter().map(|twin| twin.name()).collect();
        names.extend(HistoryTwin::ALL.iter().map(|twin| twin.name()));
        eprintln!(
            "error: no guard is called {name}; there are {}",
            names.join(", ")
        );
        return ExitCode::FAILURE;
    }
    let limits = Limits {
        horizon_ms: args.horizon,
        faults: args.faults,
        twin,
    };
    if let Some(seed) = args.replay {
        return replay(seed, limits);
    }
    if args.twins {
        return twins(&args);
    }
    // Twins of the one world mean nothing in the other.
    if twin.is_none() {
        let result = history(&args, None);
        if args.history_only || result == ExitCode::FAILURE {
            return result;
        }
    }
    worlds(&args, limits)
}

/// Runs worlds of the history uploader, and tells the story of one that went wrong.
fn history(args: &Args, twin: Option<HistoryTwin>) -> ExitCode {
    let started = Instant::now();
    let report = search_history(args.from, args.seeds, twin);
    let seconds = started.elapsed().as_secs_f64();
    for (what, count) in report.coverage.iter() {
        println!("{count:>10}  history: {what}");
    }
    let enough = rare(
        args,
        "history: ",
        HISTORY_REQUIRED,
        &report.coverage,
        report.seeds,
    );
    if let Some(finding) = &report.finding {
        replay_history(finding.seed, twin);
        let name = twin.map_or(String::new(), |twin| format!(" --twin {}", twin.name()));
        println!(
            "replay:   cargo run --release -p stream_s3_sim -- --replay-history {}{name}",
            finding.seed
        );
    }
    println!(
        "history: {} seeds, {} violations, {:.0} seeds/s, {:.0} events/s, {seconds:.1} s",
        report.seeds,
        usize::from(report.finding.is_some()),
        report.seeds as f64 / seconds,
        report.events as f64 / seconds
    );
    // Without a guard other things happen.
    if report.finding.is_none() && (enough || twin.is_some()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Prints what has to happen and did so too rarely. Answers whether that is nothing, or does not matter since there were not many worlds.
fn rare(args: &Args, of: &str, list: &[&'static str], coverage: &Coverage, seeds: u64) -> bool {
    let missing = coverage.missing(list, seeds);
    for (what, count) in &missing {
        println!("RARE {count:>5}  {of}{what}");
    }
    if let Some((what, count)) = coverage.required(list).first() {
        println!(
            "{of}coverage: {} kinds, {} below {}; the rarest is '{what}', {count} times",
            list.len(),
            missing.len(),
            bound(seeds)
        );
    }
    missing.is_empty() || !(args.require_coverage || seeds >= MILLION)
}

fn replay_history(seed: u64, twin: Option<HistoryTwin>) -> ExitCode {
    let outcome = run_history(seed, twin, true);
    let skipped = outcome.trace.len().saturating_sub(STORY);
    for line in outcome.trace.iter().skip(skipped) {
        println!("{line}");
    }
    println!("seed {seed}: {} events", outcome.events);
    outcome.violation.map_or(ExitCode::SUCCESS, |violation| {
        println!("{violation}");
        ExitCode::FAILURE
    })
}

/// Runs worlds, and prints what they came to.
fn worlds(args: &Args, limits: Limits) -> ExitCode {
    let started = Instant::now();
    let report = search(args.from, args.seeds, limits);
    let seconds = started.elapsed().as_secs_f64();
    let (seeds, coverage) = (report.seeds, &report.coverage);
    for (what, count) in coverage.iter() {
        println!("{count:>10}  {what}");
    }
    let enough = rare(args, "", REQUIRED, coverage, seeds);
    let rate = seeds as f64 / seconds;
    println!(
        "{rate:.0} seeds/s, {:.0} events/s, {seconds:.1} s",
        report.events as f64 / seconds
    );
    if args.table {
        row(&report, seconds);
    }
    let violations = usize::from(report.finding.is_some());
    if let Some(finding) = &report.finding {
        tell(finding);
    }
    println!("sim: {seeds} seeds, {violations} violations");
    if violations == 0 && enough {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A row of the table in `docs/simulation.md`.
fn row(report: &Report, seconds: f64) {
    let coverage = &report.coverage;
    let (what, count) = coverage
        .required(REQUIRED)
        .first()
        .copied()
        .unwrap_or(("", 0));
    println!(
        "| {} | {} | {:.0} s | {:.0} seeds/s | {} | {} | {count} ({what}) |",
        report.seeds,
        usize::from(report.finding.is_some()),
        seconds,
        report.seeds as f64 / seconds,
        machine(),
        commit(),
    );
}

/// Model and number of processors, as Linux tells them.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|rest| rest.split_once(':'))
        .map_or("unknown processor", |(_, model)| model.trim());
    format!("{cores} x {model}")
}

/// The commit of the checkout that the command runs in.
fn commit() -> String {
    let output = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        Ok(_) | Err(_) => "unknown commit".to_string(),
    }
}

/// The story of a finding, as short as it could be made.
fn tell(finding: &Finding) {
    println!("seed {}: {}", finding.seed, finding.violation);
    let shortest = shrink(finding);
    let outcome = run(shortest.seed, shortest.limits, true);
    let skipped = outcome.trace.len().saturating_sub(STORY);
    for line in outcome.trace.iter().skip(skipped) {
        println!("{line}");
    }
    println!(
        "shortest: {} after {} ms, with {} faults, in {} events: {}",
        shortest.seed, outcome.ended, outcome.faults, outcome.events, shortest.violation
    );
    let twin = shortest.limits.twin;
    println!(
        "replay:   cargo run --release -p stream_s3_sim -- --replay {} --horizon {} --faults {}{}",
        shortest.seed,
        shortest.limits.horizon_ms,
        shortest.limits.faults,
        twin.map_or(String::new(), |twin| format!(" --twin {}", twin.name()))
    );
}

fn replay(seed: u64, limits: Limits) -> ExitCode {
    let outcome = run(seed, limits, true);
    for line in &outcome.trace {
        println!("{line}");
    }
    println!(
        "seed {seed}: {} ms, {} events, {} faults",
        outcome.ended, outcome.events, outcome.faults
    );
    match outcome.violation {
        None => ExitCode::SUCCESS,
        Some(violation) => {
            println!("{violation}");
            ExitCode::FAILURE
        }
    }
}

fn twins(args: &Args) -> ExitCode {
    let (from, seeds) = (args.from, args.seeds);
    let mut found = 0;
    let of_worlds = if args.history_only { &[] } else { Twin::ALL };
    for twin in of_worlds {
        let limits = Limits {
            twin: Some(*twin),
            ..Limits::NONE
        };
        let report = search(from, seeds, limits);
        match &report.finding {
            Some(finding) => {
                found += 1;
                println!(
                    "found   {:<24} seed {:>6} of {:>6}: {}",
                    twin.name(),
                    finding.seed,
                    report.seeds,
                    shorten(&finding.violation.to_string())
                );
            }
            None => println!("MISSED  {:<24} in {} seeds", twin.name(), report.seeds),
        }
    }
    for twin in HistoryTwin::ALL {
        let report = search_history(from, seeds, Some(*twin));
        match &report.finding {
            Some(finding) => {
                found += 1;
                println!(
                    "found   {:<24} seed {:>6} of {:>6}: {}",
                    twin.name(),
                    finding.seed,
                    report.seeds,
                    shorten(&finding.violation)
                );
            }
            None => println!("MISSED  {:<24} in {} seeds", twin.name(), report.seeds),
        }
    }
    let all = of_worlds.len() + HistoryTwin::ALL.len();
    println!("twins: {found} of {all} found");
    if found == all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(110).collect()
}
