//! The table for people: buddyinfo's pages less nr_free_pages, base beside patched, and the verdict in words.

use std::fmt::Write as _;

use super::verdict::failed;
use super::{Report, Role, RunReport, Verdict};

/// The table of every script, then what was found, then the verdict. Plain text, ended by a newline.
#[must_use]
pub fn table(report: &Report) -> String {
    let mut text = String::new();
    let mut scripts: Vec<&str> = report.runs.iter().map(|run| run.script.as_str()).collect();
    scripts.dedup();
    for script in scripts {
        let runs: Vec<&RunReport> = report.runs.iter().filter(|run| run.script == script).collect();
        script_table(&mut text, script, &runs);
    }
    for run in &report.runs {
        text.push_str(&findings(run.role.name(), run));
    }
    for role in [Role::Base, Role::Patched] {
        checked(&mut text, report, role);
    }
    for role in [Role::Base, Role::Patched] {
        if let Some(kernel) = report.kernel(role) {
            let series = match kernel.series.len() {
                0 => String::new(),
                1 => format!(" with {:?}", kernel.series[0]),
                count => format!(" with {count} patches"),
            };
            let name = role.name();
            let _ =
                writeln!(text, "{name:8} {} {} ({}){series}", kernel.release, kernel.flavour, kernel.spec);
        }
    }
    if report.no_change {
        text.push_str("no change: base and patched are the same image to the byte\n");
    }
    let _ = writeln!(text, "{}", words(report));
    text
}

fn script_table(text: &mut String, script: &str, runs: &[&RunReport]) {
    let widest = runs.iter().max_by_key(|run| run.checkpoints.len());
    let Some(widest) = widest.filter(|run| !run.checkpoints.is_empty()) else { return };
    let all_frozen = runs.iter().all(|run| run.checkpoints.iter().all(|checkpoint| checkpoint.frozen));
    let how = if all_frozen { "at one instant, frozen" } else { "buddyinfo, nr_free_pages" };
    let _ = writeln!(text, "{script}: pages on the free lists that are not counted as free ({how})");
    let _ = write!(text, "  {:<12} {:<10}", "zone", "");
    for checkpoint in &widest.checkpoints {
        let _ = write!(text, " {:>10}", checkpoint.name);
    }
    text.push('\n');
    for zone in widest.checkpoints[0].zones.iter().map(|zone| &zone.zone) {
        let mut label = zone.as_str();
        for run in runs {
            let mut name = run.role.name().to_owned();
            if run.round > 1 {
                let _ = write!(name, " #{}", run.round);
            }
            let _ = write!(text, "  {label:<12} {name:<10}");
            label = "";
            for index in 0..widest.checkpoints.len() {
                let zones = run.checkpoints.get(index).map(|checkpoint| &checkpoint.zones);
                match zones.and_then(|zones| zones.iter().find(|other| other.zone == *zone)) {
                    Some(zone) => drop(write!(text, " {:>10}", zone.best_delta())),
                    None => drop(write!(text, " {:>10}", "-")),
                }
            }
            text.push('\n');
        }
    }
    text.push('\n');
}

/// How much was checked of a kernel in all its runs, and how much of it was wrong.
fn checked(text: &mut String, report: &Report, role: Role) {
    let sum =
        |of: fn(&RunReport) -> u64| report.runs.iter().filter(|run| run.role == role).map(of).sum::<u64>();
    let checkpoints = sum(|run| run.checkpoints.len() as u64);
    let violations = sum(|run| run.violations.len() as u64);
    let _ = write!(text, "{:8} violations: {violations} at {checkpoints} checkpoints", role.name());
    match sum(|run| run.batches) {
        0 => text.push('\n'),
        batches => {
            let (operations, diverged) = (sum(|run| run.operations), sum(|run| run.diverged));
            let _ = writeln!(
                text,
                "; divergences from the model: {diverged} in {operations} operations of {batches} batches"
            );
        }
    }
}

/// What was found in a run of the kernel called `name`: violations by invariant and zone, the worst of each; reports;
/// failures. Nothing where nothing was found.
#[must_use]
pub fn findings(name: &str, run: &RunReport) -> String {
    let mut text = String::new();
    let mut seen = Vec::new();
    for violation in &run.violations {
        let key = (violation.invariant, &violation.zone);
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        let alike = run.violations.iter().filter(|other| (other.invariant, &other.zone) == key);
        let size = |violation: &crate::check::Violation| violation.expected.abs_diff(violation.found);
        let Some(worst) = alike.clone().max_by_key(|violation| size(violation)) else { continue };
        let place = if worst.zone.is_empty() { String::new() } else { format!(" in {}", worst.zone) };
        let checkpoints: Vec<&str> = alike.map(|violation| violation.checkpoint.as_str()).collect();
        let worst_of =
            if checkpoints.len() > 1 { format!(", most at {}", worst.checkpoint) } else { String::new() };
        let at = shortened(&checkpoints);
        let _ = writeln!(text, "{name}: {} broken{place} at {at}{worst_of}: {}", worst.invariant, worst.text);
    }
    for divergence in &run.divergences {
        for line in divergence.lines() {
            let _ = writeln!(text, "{name}: {line}");
        }
    }
    for report in run.console.iter().filter(|report| report.kind.is_finding()) {
        let when = if report.after_ready { "" } else { " (before the agent was ready: not counted)" };
        let _ = writeln!(text, "{name}: console line {}: {}{when}", report.line, report.text);
    }
    if let Some(failure) = failed(run) {
        let _ = writeln!(text, "{name}: {failure}");
    }
    if let Some(reason) = &run.no_verdict {
        let _ = writeln!(text, "{name}: no verdict: {reason}");
    }
    if let Some(tail) = &run.console_tail {
        let empty = if tail.is_empty() { " there are none" } else { "" };
        let _ = writeln!(text, "{name}: the console's last lines:{empty}");
        for line in tail.lines() {
            let _ = writeln!(text, "  | {line}");
        }
        let _ = writeln!(text, "{name}: repeat with --keep DIR, and then: {}", run.command);
    }
    text
}

fn shortened(names: &[&str]) -> String {
    let mut names: Vec<&str> = names.to_vec();
    names.dedup();
    match names.len() {
        0..=4 => names.join(", "),
        count => format!("{}, …, {} ({count} checkpoints)", names[0], names[count - 1]),
    }
}

/// The verdict in words.
fn words(report: &Report) -> String {
    let has_findings = |role| {
        report.runs.iter().any(|run| {
            run.role == role && (!run.violations.is_empty() || run.diverged > 0 || failed(run).is_some())
        })
    };
    let base = if has_findings(Role::Base) { "base is not" } else { "so is base" };
    match report.verdict {
        Verdict::Consistent => format!("verdict: the patched kernel is consistent; {base}"),
        Verdict::Violation => {
            let both = if has_findings(Role::Base) { "; so does base" } else { "; base does not" };
            format!("verdict: violation: the patched kernel breaks an invariant{both}")
        }
        Verdict::Divergence => {
            let both = if has_findings(Role::Base) { "; nor does base" } else { "; base does" };
            format!("verdict: divergence: the patched kernel does not do what the model says{both}")
        }
        Verdict::GuestFailure => {
            "verdict: guest failure: the patched kernel failed while the script ran".to_owned()
        }
        Verdict::NoVerdict => {
            format!("verdict: none: {}", report.reason.as_deref().unwrap_or("no reason is known"))
        }
    }
}
