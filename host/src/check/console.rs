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
    /// A process was killed for its memory. No finding.
    OutOfMemory,
}

impl Kind {
    /// Whether the kernel is at fault.
    #[must_use]
    pub fn is_finding(self) -> bool {
        !matches!(self, Self::AllocationFailure | Self::OutOfMemory)
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
    Start,
    Anywhere,
}

/// First lines of reports, the more special first. Sources: kernel/panic.c, lib/bug.c, arch/x86/kernel/traps.c and
/// dumpstack.c, arch/x86/mm/fault.c, mm/page_alloc.c, mm/memory.c, lib/list_debug.c, kernel/watchdog.c,
/// kernel/rcu/tree_stall.h, kernel/hung_task.c, mm/kasan/report.c, mm/kfence/report.c, lib/ubsan.c, mm/oom_kill.c.
const TABLE: [(Kind, At, &str); 27] = [
    (Kind::Panic, At::Start, "Kernel panic - not syncing"),
    (Kind::BadPage, At::Start, "BUG: Bad page state"),
    (Kind::BadPage, At::Start, "BUG: Bad page map"),
    (Kind::BadPage, At::Start, "BUG: Bad page cache"),
    (Kind::BadPage, At::Start, "BUG: Bad rss-counter state"),
    (Kind::BadPage, At::Start, "page allocator bug:"),
    (Kind::Sanitizer, At::Start, "BUG: KASAN:"),
    (Kind::Sanitizer, At::Start, "BUG: KFENCE:"),
    (Kind::Sanitizer, At::Start, "BUG: KCSAN:"),
    (Kind::Sanitizer, At::Start, "BUG: KMSAN:"),
    (Kind::Sanitizer, At::Start, "UBSAN:"),
    (Kind::Lockup, At::Anywhere, "BUG: soft lockup"),
    (Kind::Lockup, At::Anywhere, "hard LOCKUP"),
    (Kind::Lockup, At::Anywhere, "detected stalls on CPUs/tasks"),
    (Kind::Lockup, At::Anywhere, "self-detected stall on CPU"),
    (Kind::Lockup, At::Anywhere, "blocked for more than"),
    (Kind::List, At::Anywhere, "list_add corruption"),
    (Kind::List, At::Anywhere, "list_del corruption"),
    (Kind::Oops, At::Start, "BUG: unable to handle"),
    (Kind::Oops, At::Start, "BUG: kernel NULL pointer dereference"),
    (Kind::Oops, At::Start, "Oops:"),
    (Kind::Oops, At::Start, "general protection fault"),
    (Kind::Bug, At::Start, "kernel BUG at"),
    (Kind::Bug, At::Start, "BUG: "),
    (Kind::Warning, At::Start, "WARNING: "),
    (Kind::AllocationFailure, At::Anywhere, "page allocation failure:"),
    (Kind::OutOfMemory, At::Start, "Out of memory: Killed process"),
];

/// Reports that one run keeps; a kernel that never stops complaining has said enough by then.
const REPORTS_MAX: usize = 100;
/// Characters of a first line that are kept.
const TEXT_MAX: usize = 200;

/// Finds every report on a console.
#[must_use]
pub fn scan(console: &[u8]) -> Vec<ConsoleReport> {
    let mut reports = Vec::new();
    let mut after_ready = false;
    for (line, bytes) in (1..).zip(console.split(|byte| *byte == b'\n')) {
        // A first line is never longer, and an endless one must not be copied.
        let bytes = &bytes[..bytes.len().min(1000)];
        let text = String::from_utf8_lossy(bytes);
        let text = without_prefix(text.trim_end());
        if text == READY_LINE {
            after_ready = true;
        }
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
    reports
}

/// Takes off what printk puts before a message: `[    1.234567] ` and, with a caller, `[    1.234567][    T1] `.
fn without_prefix(mut text: &str) -> &str {
    while let Some(rest) = text.strip_prefix('[') {
        let Some((prefix, rest)) = rest.split_once(']') else { break };
        let fits = |c: char| c.is_ascii_digit() || matches!(c, ' ' | '.' | 'T' | 'C');
        if prefix.is_empty() || !prefix.chars().all(fits) {
            break;
        }
        text = rest.strip_prefix(' ').unwrap_or(rest);
    }
    text
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
        scan(console.as_bytes()).iter().map(|report| (report.kind, report.is_finding())).collect()
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
            let kind = serde_json::to_value(scan(&log).first().map(|report| report.kind)).unwrap();
            let expected = name.split_once('.').unwrap().0;
            assert_eq!(kind.as_str().unwrap_or("nothing"), expected, "{}", path.display());
        }
    }

    #[test]
    fn reports_count_from_ready_on() {
        let log = "[    0.1] WARNING: CPU: 0 PID: 1 at mm/x.c:1 f+0x1/0x2\nbuddydiff agent: ready\n[    1.0] BUG: Bad page state in process init  pfn:01234\n";
        assert_eq!(kinds(log), [(Kind::Warning, false), (Kind::BadPage, true)]);
    }

    #[test]
    fn words_inside_other_messages_are_no_reports() {
        assert_eq!(kinds("[    0.0] x86/mm: reporting a BUG: to nobody\nnot a WARNING: either\n"), []);
    }

    #[test]
    fn a_flood_and_endless_lines_are_bounded() {
        let mut log = vec![b'x'; 10 << 20];
        log.extend("\nBUG: again".repeat(10_000).bytes());
        assert_eq!(scan(&log).len(), REPORTS_MAX);
    }

    #[test]
    fn taint_bits_are_told_apart() {
        assert!(taint_findings(1 << 12 | 1).is_empty(), "an out-of-tree module is no fault");
        assert_eq!(taint_findings(1 << 9 | 1 << 5).len(), 2);
    }
}
