use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Script, ScriptError> {
    Script::parse("test.toml", text)
}

fn unroll(text: &str) -> Result<Vec<Step>, ScriptError> {
    let script = parse(text)?;
    script.unroll("test.toml", script.memory_mib)
}

fn message(text: &str) -> String {
    unroll(text).unwrap_err().to_string()
}

const SMALL: &str = "about = 'a'\n[[step]]\ncheckpoint = 'a'\n";

#[test]
fn repeats_are_written_out_and_their_checkpoints_numbered() {
    let steps = unroll(
        "about = 'a'\n[[step]]\n[step.repeat]\ntimes = 2\n[[step.repeat.step]]\ncompact = {}\n\
         [[step.repeat.step]]\ncheckpoint = 'load'\n",
    )
    .unwrap();
    let shown: Vec<String> = steps.iter().map(Step::to_string).collect();
    assert_eq!(shown, ["compact all zones", "checkpoint load-1", "compact all zones", "checkpoint load-2"]);
}

#[test]
fn an_unknown_field_is_named_with_its_line_and_what_is_allowed() {
    let text = format!("{SMALL}[[step]]\nanonymous = {{ name = 'a', mib = 1, size = 2 }}\n");
    let message = message(&text);
    for part in ["test.toml", "line 5", "size", "`mib`"] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn an_unknown_step_is_named_with_its_line_and_what_is_allowed() {
    let message = message(&format!("{SMALL}[[step]]\nshake = {{}}\n"));
    for part in ["line 5", "shake", "`anonymous`", "`wait_quiet`"] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn impossible_values_are_named_with_their_line_and_what_is_allowed() {
    for (step, part) in [
        ("anonymous = { name = 'A B', mib = 1 }", "1 to 32 of a-z"),
        ("anonymous = { name = 'a', mib = 0 }", "1 to 1048576"),
        ("anonymous = { name = 'a', mib = 1, page = '8KiB' }", "16KiB"),
        ("pipes = { name = 'a', count = 1, kib = 5 }", "power of two"),
        ("write = { path = '/etc/passwd', value = '' }", "below /proc/sys/"),
        ("write = { path = '/proc/sys/../kcore', value = '' }", "without .."),
        ("free = { name = 'a', part = 'half' }", "`odd-pages`"),
        ("page_tables = { name = 'a', count = -1 }", "-1"),
        ("batches = { count = 0 }", "1 to 100000"),
    ] {
        let message = message(&format!("{SMALL}[[step]]\n{step}\n"));
        assert!(message.contains("line 5"), "no line in: {message}");
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn a_checkpoint_is_a_name_or_a_table() {
    let steps = unroll(
        "about = 'a'\n[[step]]\ncheckpoint = 'a'\n[[step]]\ncheckpoint = { name = 'b' }\n\
         [[step]]\ncheckpoint = { name = 'c', frozen = true }\n\
         [[step]]\nrepeat = { times = 1, step = [{ checkpoint = { name = 'd', frozen = true } }] }\n",
    )
    .unwrap();
    let shown: Vec<String> = steps.iter().map(Step::to_string).collect();
    assert_eq!(shown, ["checkpoint a", "checkpoint b", "checkpoint c, frozen", "checkpoint d-1, frozen"]);
    // A plan's format does not describe itself.
    let plan = postcard::to_stdvec(&steps).unwrap();
    assert_eq!(postcard::from_bytes::<Vec<Step>>(&plan).unwrap(), steps);
}

#[test]
fn a_checkpoint_that_is_neither_is_named_with_its_line_and_what_is_allowed() {
    for (step, parts) in [
        ("checkpoint = 'A B'", ["1 to 32 of a-z", "A B"]),
        ("checkpoint = 1", ["frozen = true", "integer"]),
        ("checkpoint = { name = 'c', frozen = 'yes' }", ["boolean", "yes"]),
        ("checkpoint = { name = 'c', cold = true }", ["cold", "`frozen`"]),
        ("checkpoint = { frozen = true }", ["missing", "`name`"]),
        ("checkpoint = { name = 'C', frozen = true }", ["1 to 32 of a-z", "\"C\""]),
    ] {
        let message = message(&format!("{SMALL}[[step]]\n{step}\n"));
        for part in parts.into_iter().chain(["line 5"]) {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    }
}

#[test]
fn what_is_freed_must_be_held() {
    assert!(
        message(&format!("{SMALL}[[step]]\nfree = {{ name = 'b' }}\n")).contains("nothing is held as \"b\"")
    );
}

#[test]
fn a_name_is_taken_once_at_a_time() {
    let take = "[[step]]\nanonymous = { name = 'x', mib = 1 }\n";
    assert!(message(&format!("{SMALL}{take}{take}")).contains("still held"));
    let free = "[[step]]\nfree = { name = 'x' }\n";
    unroll(&format!("{SMALL}{take}{free}{take}")).unwrap();
}

#[test]
fn only_anonymous_memory_is_freed_in_part() {
    let free = "[[step]]\nfree = { name = 'x', part = 'odd-pages' }\n";
    unroll(&format!("{SMALL}[[step]]\nanonymous = {{ name = 'x', mib = 1 }}\n{free}")).unwrap();
    let message = message(&format!("{SMALL}[[step]]\npage_tables = {{ name = 'x', count = 1 }}\n{free}"));
    assert!(message.contains("no anonymous memory"), "{message}");
}

#[test]
fn a_script_without_a_checkpoint_is_refused() {
    assert!(message("about = 'a'\n[[step]]\ncompact = {}\n").contains("no checkpoint"));
}

#[test]
fn more_memory_than_the_guest_has_is_refused_before_it_boots() {
    let two =
        "[[step]]\nanonymous = { name = 'x', mib = 300 }\n[[step]]\nanonymous = { name = 'y', mib = 300 }\n";
    let text = format!("memory_mib = 512\n{SMALL}{two}");
    assert!(matches!(unroll(&text), Err(ScriptError::TooMuchMemory { step: 3, needed_mib: 600, .. })));
    let freed = "[[step]]\nanonymous = { name = 'x', mib = 300 }\n[[step]]\nfree = { name = 'x' }\n\
                 [[step]]\nanonymous = { name = 'y', mib = 300 }\n";
    unroll(&format!("memory_mib = 512\n{SMALL}{freed}")).unwrap();
}

#[test]
fn nested_repeats_cannot_explode() {
    let mut inner = "checkpoint = 'a'".to_owned();
    for _ in 0..3 {
        inner = format!("repeat = {{ times = 10000000, step = [ {{ {inner} }} ] }}");
    }
    assert!(message(&format!("about = 'a'\n[[step]]\n{inner}\n")).contains("steps"));
}

#[test]
fn every_page_size_reads_back_as_written() {
    for text in ["4KiB", "64KiB", "1MiB", "2MiB", "1GiB"] {
        assert_eq!(String::from(PageSize::try_from(text.to_owned()).unwrap()), text);
    }
}

/// The scripts of this repository are all possible in the guest they ask for.
#[test]
fn the_shipped_scripts_are_sound() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let script = Script::parse(path.to_str().unwrap(), &std::fs::read_to_string(&path).unwrap()).unwrap();
        script.unroll(path.to_str().unwrap(), script.memory_mib).unwrap();
        seen += 1;
    }
    assert!(seen >= 2, "{directory} holds {seen} scripts");
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(about|step|\\[|\\]|=|\\{|\\}|'|[a-z]|[0-9]|\n| ){0,80}") {
        let _ = unroll(&text);
    }
}

#[test]
fn batches_are_bounded_in_all_and_worth_a_script() {
    let steps = unroll("about = 'a'\n[[step]]\nbatches = { count = 7, free = true }\n").unwrap();
    assert_eq!((batches(&steps), steps[0].to_string()), (7, "run 7 batches".to_owned()));
    let text = "about = 'a'\n[[step]]\n[step.repeat]\ntimes = 11\n[[step.repeat.step]]\nbatches = { count = 100000 }\n";
    assert!(message(text).contains("1100000 in all, at most 1000000"), "{}", message(text));
}
