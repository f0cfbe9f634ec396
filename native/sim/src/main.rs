//! `stream_s3_sim`: runs worlds, and tells the story of one that went wrong.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use stream_s3_sim::{Finding, Limits, Twin, run, search, shrink};

/// Lines of a story that are shown at most.
const STORY: usize = 400;

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
    /// When activity and faults end at the latest, in milliseconds of the world's time.
    #[arg(long, default_value_t = u64::MAX)]
    horizon: u64,
    /// After how many faults there are no more.
    #[arg(long, default_value_t = u64::MAX)]
    faults: u64,
    /// The guard that is taken out.
    #[arg(long)]
    twin: Option<String>,
    /// Finds the damage of every missing guard, within so many seeds each.
    #[arg(long)]
    twins: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let twin = args.twin.as_deref().and_then(Twin::of_name);
    if let (Some(name), None) = (&args.twin, twin) {
        let names: Vec<&str> = Twin::ALL.iter().map(|twin| twin.name()).collect();
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
        return twins(args.from, args.seeds);
    }
    let started = Instant::now();
    let report = search(args.from, args.seeds, limits);
    let seconds = started.elapsed().as_secs_f64();
    for (what, count) in report.coverage.iter() {
        println!("{count:>10}  {what}");
    }
    println!(
        "{:.0} seeds/s, {:.0} events/s, {seconds:.1} s",
        report.seeds as f64 / seconds,
        report.events as f64 / seconds
    );
    let violations = usize::from(report.finding.is_some());
    if let Some(finding) = &report.finding {
        tell(finding);
    }
    println!("sim: {} seeds, {violations} violations", report.seeds);
    if violations == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
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

fn twins(from: u64, seeds: u64) -> ExitCode {
    let mut found = 0;
    for twin in Twin::ALL {
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
    println!("twins: {found} of {} found", Twin::ALL.len());
    if found == Twin::ALL.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(110).collect()
}
