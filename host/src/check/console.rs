//! What a kernel says of itself on its console: reports that are findings, by a table of their first lines.

use serde::Serialize;

/// What a report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The kernel gave up.
    Panic,
    /// An exception in kernel mode.
    Oops,
    /// `BUG()` or a report that starts so.
    Bug,
    /// The allocator's own report of a broken page.
    BadPage,
    /// A broken list.
    List,
    /// `WARN()`.
    Warning,
    /// A sanitizer's report.
    Sanitizer,
    /// A lockup or a stall.
    Lockup,
    /// An allocation failed loudly. Scripts may provoke that: no finding.
    AllocationFailure,
    /// A process was killed for its memory, or none was left to be killed. The script asked for too much: no finding.
    OutOfMemory,
    /// The kernel gave up because PID 1 ended. If that was the kernel's fault, another report says so: no finding.
    AgentEnded,
}

impl Kind {
    /// Whether the kernel is at fault.
    #[must_use]
    pub fn is_finding(self) -> bool {
        !matches!(self, Self::AllocationFailure | Self::OutOfMemory | Self::AgentEnded)
    }
}

/// One report of the kernel's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConsoleReport {
    /// What it is about.
    pub kind: Kind,
    /// Its line on the console, from 1.
    pub line: usize,
    /// Whether the agent was ready: only from then on a report is a finding.
    pub after_ready: bool,
    /// Its first line without time stamp, made printable and cut short.
    pub text: String,
}

impl ConsoleReport {
    /// Whether this counts against the kernel.
    #[must_use]
    pub fn is_finding(&self) -> bool {
        self.after_ready && self.kind.is_finding()
    }
}

/// What the agent prints when it is ready; what stands above is boot.
pub const READY_LINE: &str = "buddydiff agent: ready";

/// Where in a line a pattern must be.
enum At {
    /// Where a message of the kernel's begins: at the start, or after a time stamp if the line was begun by others.
    Start,
    Anywhere,
}

/// First lines of reports, the more special first. Sources: kernel/panic.c, kernel/exit.c, mm/oom_kill.c, lib/bug.c,
/// arch/x86/kernel/traps.c and dumpstack.c, arch/x86/mm/fault.c, mm/page_alloc.c, mm/memory.c, mm/page_poison.c, mm/slub.c,
/// lib/list_debug.c, kernel/watchdog.c, kernel/workqueue.c, kernel/rcu/tree_stall.h and tree_exp.h, kernel/hung_task.c,
/// kernel/locking/lockdep.c, mm/kasan/report.c, mm/kfence/report.c, lib/ubsan.c, of 6.1 to 7.3.
const TABLE: [(Kind, At, &str); 36] = [
    (Kind::AgentEnded, At::Start, "Kernel panic - not syncing: Attempted to kill init"),
    (Kind::OutOfMemory, At::Start, "Kernel panic - not syncing: System is deadlocked on memory"),
    (Kind::Panic, At::Start, "Kernel panic - not syncing"),
    (Kind::BadPage, At::Start, "BUG: Bad page state"),
    (Kind::BadPage, At::Start, "BUG: Bad page map"),
    (Kind::BadPage, At::Start, "BUG: Bad page cache"),
    (Kind::BadPage, At::Start, "BUG: Bad rss-counter state"),
    (Kind::BadPage, At::Start, "pagealloc: memory corruption"),
    (Kind::BadPage, At::Start, "pagealloc: single bit error"),
    (Kind::Sanitizer, At::Start, "BUG: KASAN:"),
    (Kind::Sanitizer, At::Start, "BUG: KFENCE:"),
    (Kind::Sanitizer, At::Start, "BUG: KCSAN:"),
    (Kind::Sanitizer, At::Start, "BUG: KMSAN:"),
    (Kind::Sanitizer, At::Start, "UBSAN:"),
    (Kind::Lockup, At::Start, "BUG: workqueue lockup"),
    (Kind::Lockup, At::Anywhere, "BUG: soft lockup"),
    (Kind::Lockup, At::Anywhere, "hard LOCKUP"),
    (Kind::Lockup, At::Anywhere, "detected stalls on CPUs/tasks"),
    (Kind::Lockup, At::Anywhere, "detected expedited stalls"),
    (Kind::Lockup, At::Anywhere, "self-detected stall on CPU"),
    (Kind::Lockup, At::Anywhere, "blocked for more than"),
    (Kind::Lockup, At::Anywhere, "blocked in I/O wait for more than"),
    (Kind::List, At::Anywhere, "list_add corruption"),
    (Kind::List, At::Anywhere, "list_del corruption"),
    (Kind::Oops, At::Start, "BUG: unable to handle"),
    (Kind::Oops, At::Start, "BUG: kernel NULL pointer dereference"),
    (Kind::Oops, At::Start, "Oops:"),
    (Kind::Oops, At::Anywhere, "PANIC: double fault"),
    // 6.1 begins with the exception's name: `general protection fault, …: 0000 [#1] SMP`.
    (Kind::Oops, At::Anywhere, " [#1]"),
    (Kind::Bug, At::Start, "kernel BUG at"),
    (Kind::Bug, At::Start, "BUG: "),
    (Kind::Bug, At::Start, "BUG "),
    (Kind::Bug, At::Start, "[ BUG: "),
    (Kind::Warning, At::Start, "WARNING: "),
    (Kind::AllocationFailure, At::Anywhere, "page allocation failure:"),
    (Kind::OutOfMemory, At::Start, "Out of memory: Killed process"),
];

/// Reports that one run keeps; a kernel that never stops complaining has said enough by then.
const REPORTS_MAX: usize = 100;
/// Characters of a first line that are kept.
const TEXT_MAX: usize = 200;

/// Finds every report on a console. `ready` says whether the agent ever was: if its line is nowhere, because the kernel
/// wrote into it, every report may be from later on, and counts.
#[must_use]
pub fn scan(console: &[u8], ready: bool) -> Vec<ConsoleReport> {
    let mut reports = Vec::new();
    let mut after_ready = false;
    for (line, bytes) in (1..).zip(console.split(|byte| *byte == b'\n')) {
        // A first line is never longer, and an endless one must not be copied.
        let bytes = &bytes[..bytes.len().min(1000)];
        let text = String::from_utf8_lossy(bytes);
        let line_text = text.trim_end();
        after_ready |= line_text.contains(READY_LINE);
        let text = message(line_text);
        let found = TABLE.iter().find(|(_, at, pattern)| match at {
            At::Start => text.starts_with(pattern),
            At::Anywhere => text.contains(pattern),
        });
        if let Some((kind, ..)) = found {
            let text = text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect();
            reports.push(ConsoleReport { kind: *kind, line, after_ready, text });
            if reports.len() == REPORTS_MAX {
                break;
            }
        }
    }
    if ready && !after_ready && !contains(console, READY_LINE.as_bytes()) {
        reports.iter_mut().for_each(|report| report.after_ready = true);
    }
    reports
}

fn contains(console: &[u8], text: &[u8]) -> bool {
    console.windows(text.len()).any(|window| window == text)
}

/// The message of a line: what follows printk's `[    1.234567] ` and, with a caller, `[    1.234567][    T1] `.
///
/// The kernel prints on the console whenever it has to, also behind half a line of user space's, so a time stamp counts
/// wherever it stands; without one the whole line is the message.
fn message(line: &str) -> &str {
    line.match_indices('[').find_map(|(at, _)| after_prefix(&line[at..])).unwrap_or(line)
}

/// What follows a time stamp at the start of `text`, and a caller behind it.
fn after_prefix(text: &str) -> Option<&str> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (stamp, rest) = text.strip_prefix('[')?.split_once(']')?;
    let (seconds, fraction) = stamp.trim_start().split_once('.')?;
    if !digits(seconds) || !digits(fraction) {
        return None;
    }
    let behind_caller = rest
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
        .filter(|(caller, _)| caller.trim_start().strip_prefix(['T', 'C']).is_some_and(digits));
    let rest = behind_caller.map_or(rest, |(_, rest)| rest);
    Some(rest.strip_prefix(' ').unwrap_or(rest))
}

/// Bits of `/proc/sys/kernel/tainted` (Documentation/admin-guide/tainted-kernels.rst) that mean a fault was noticed, even
/// if the console lost it.
const TAINT_FINDINGS: [(u32, &str); 5] = [
    (4, "M: a machine check"),
    (5, "B: a bad page or page table"),
    (7, "D: the kernel died before"),
    (9, "W: a warning"),
    (14, "L: a soft lockup"),
];

/// What a taint says went wrong.
#[must_use]
pub fn taint_findings(tainted: u64) -> Vec<&'static str> {
    TAINT_FINDINGS.iter().filter(|(bit, _)| tainted >> bit & 1 == 1).map(|(_, text)| *text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(console: &str) -> Vec<(Kind, bool)> {
        scan(console.as_bytes(), true).iter().map(|report| (report.kind, report.is_finding())).collect()
    }

    /// Logs as kernels print them, and what is in them.
    #[test]
    fn golden_logs() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/console");
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        assert!(names.len() >= 10, "{folder} holds {} logs", names.len());
        for path in names {
            let log = std::fs::read(&path).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            // The name says what is to be found: kind, then a word of choice.
            let kind = serde_json::to_value(scan(&log, true).first().map(|report| report.kind)).unwrap();
            let expected = name.split_once('.').unwrap().0;
            assert_eq!(kind.as_str().unwrap_or("nothing"), expected, "{}", path.display());
        }
    }

    #[test]
    fn reports_count_from_ready_on() {
        let log = "[    0.1] WARNING: CPU: 0 PID: 1 at mm/x.c:1 f+0x1/0x2\nbuddydiff agent: ready\n[    1.0] BUG: Bad page state in process init  pfn:01234\n";
        assert_eq!(kinds(log), [(Kind::Warning, false), (Kind::BadPage, true)]);
    }

    /// The kernel may write into the agent's line; what it reports must count all the same.
    #[test]
    fn reports_count_where_the_ready_line_is_torn() {
        let log =
            "[    0.1] WARNING: one\nbuddydiff ag[    1.0] random: done\nent: ready\n[    2.0] BUG: two\n";
        assert_eq!(kinds(log), [(Kind::Warning, true), (Kind::Bug, true)]);
        let booting = scan(b"[    0.1] WARNING: one\n", false);
        assert!(!booting[0].is_finding(), "the agent was never ready");
    }

    #[test]
    fn words_inside_other_messages_are_no_reports() {
        assert_eq!(kinds("[    0.0] x86/mm: reporting a BUG: to nobody\nnot a WARNING: either\n"), []);
    }

    #[test]
    fn a_flood_and_endless_lines_are_bounded() {
        let mut log = vec![b'x'; 10 << 20];
        log.extend("\nBUG: again".repeat(10_000).bytes());
        assert_eq!(scan(&log, true).len(), REPORTS_MAX);
    }

    #[test]
    fn taint_bits_are_told_apart() {
        assert!(taint_findings(1 << 12 | 1).is_empty(), "an out-of-tree module is no fault");
        assert_eq!(taint_findings(1 << 9 | 1 << 5).len(), 2);
    }
}
