//! What people read on stderr while work goes on: bars and live lines on a terminal, plain lines elsewhere.
//!
//! Nothing here ever writes to stdout: that belongs to lists and to `--json -`.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often a plain line may repeat the state of one task. A log wants a sign of life, not every percent.
const PLAIN_EVERY: Duration = Duration::from_secs(20);

/// The one place that writes progress. Shared by reference between threads.
#[derive(Debug)]
pub(crate) struct Progress {
    verbose: bool,
    bars: Option<MultiProgress>,
}

impl Progress {
    /// Bars if stderr is a terminal, plain lines if not. `verbose` shows each external command before it runs.
    #[must_use]
    pub(crate) fn new(verbose: bool) -> Self {
        let bars = std::io::stderr()
            .is_terminal()
            .then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));
        Self { verbose, bars }
    }

    /// Whether external commands are shown.
    #[must_use]
    pub(crate) fn verbose(&self) -> bool {
        self.verbose
    }

    /// Starts a task with a line of its own.
    #[must_use]
    pub(crate) fn task(&self, name: &str) -> Task<'_> {
        let bar = self.bars.as_ref().map(|bars| {
            let bar = bars.add(ProgressBar::no_length().with_prefix(name.to_owned()));
            bar.set_style(style("{spinner} {prefix}: {wide_msg} {elapsed}"));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        let now = Instant::now();
        let state = State { said: String::new(), printed: now, sized: false };
        Task { progress: self, name: name.to_owned(), started: now, bar, state: Mutex::new(state) }
    }

    /// Prints a line that stays, above whatever moves.
    pub(crate) fn line(&self, text: &str) {
        match &self.bars {
            // A closed stderr must not end the work, as `eprintln!` would; but that is what a test's output goes through.
            Some(bars) => drop(bars.println(text)),
            None if cfg!(test) => eprintln!("{text}"),
            None => drop(std::io::Write::write_all(&mut std::io::stderr(), format!("{text}\n").as_bytes())),
        }
    }

    /// Shows an external command before it runs, if asked for.
    pub(crate) fn command(&self, line: &str) {
        if self.verbose {
            self.line(&format!("+ {line}"));
        }
    }
}

/// One line of progress. Dropping it without [`Task::done`] takes the line away.
#[derive(Debug)]
pub(crate) struct Task<'a> {
    progress: &'a Progress,
    name: String,
    started: Instant,
    bar: Option<ProgressBar>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    said: String,
    printed: Instant,
    sized: bool,
}

impl Task<'_> {
    /// What the task does now. A plain log gets the line once, when it changes.
    pub(crate) fn say(&self, message: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.said == message {
            return;
        }
        message.clone_into(&mut state.said);
        match &self.bar {
            Some(bar) => bar.set_message(message.to_owned()),
            None => {
                state.printed = Instant::now();
                self.progress.line(&format!("{}: {message}", self.name));
            }
        }
    }

    /// How far it is. `total` may be an estimate: more done than expected is shown as all done.
    pub(crate) fn step(&self, done: u64, total: u64) {
        let total = total.max(1);
        let done = done.min(total);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = &self.bar {
            if !state.sized {
                state.sized = true;
                bar.set_style(style("{spinner} {prefix}: {wide_msg} {bar:24} {percent:>3}% {elapsed}"));
            }
            bar.set_length(total);
            bar.set_position(done);
        } else if state.printed.elapsed() >= PLAIN_EVERY {
            state.printed = Instant::now();
            let elapsed = seconds(self.started.elapsed());
            self.progress.line(&format!(
                "{}: {} ({}%, {elapsed})",
                self.name,
                state.said,
                done * 100 / total
            ));
        }
    }

    /// Ends the task; the message stays, with the time it took.
    pub(crate) fn done(self, message: &str) {
        let elapsed = seconds(self.started.elapsed());
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.progress.line(&format!("{}: {message} ({elapsed})", self.name));
    }
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants above; the fallback keeps a typo from ending a run.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A duration as people say it.
#[must_use]
pub(crate) fn seconds(duration: Duration) -> String {
    let secs = duration.as_secs();
    match secs {
        0..=9 => format!("{:.1} s", duration.as_secs_f64()),
        10..=119 => format!("{secs} s"),
        _ => format!("{} min {} s", secs / 60, secs % 60),
    }
}

/// A number of bytes as people say it.
#[must_use]
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)];
    for (unit, size) in UNITS {
        if count >= size {
            let tenths = count / (size / 10);
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{count} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_read_well() {
        assert_eq!(seconds(Duration::from_millis(1250)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(75)), "75 s");
        assert_eq!(seconds(Duration::from_secs(275)), "4 min 35 s");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_250_000), "1.2 MB");
        assert_eq!(bytes(2_000_000_000), "2.0 GB");
    }

    #[test]
    fn a_task_may_overrun_its_estimate() {
        let progress = Progress::new(false);
        let task = progress.task("test");
        task.step(20, 10);
        task.step(0, 0);
    }
}
