//! A guest that a test runs by itself, to look at its memory.

use std::path::PathBuf;
use std::time::Duration;

use guest_agent::script::Script;
use host::observe::frozen::Kernel;
use host::run::{FrozenObserver, Run, RunConfig, run};
use host::vm::qemu::Qemu;

use super::xtask;

/// A kernel, built, and the agent for it.
pub(crate) struct Subject {
    vmlinux: PathBuf,
    pub(crate) kernel: Kernel,
    agent: Vec<u8>,
}

impl Subject {
    pub(crate) fn new(kernel: &str, flavour: &str, driver: bool) -> Self {
        let mut arguments = vec!["kernel", "build", kernel, "--flavour", flavour];
        arguments.extend(driver.then_some("--driver"));
        let last_word = |arguments: &[&str]| {
            let printed = String::from_utf8(xtask(arguments).stdout).expect("UTF-8");
            PathBuf::from(printed.split_whitespace().last().expect("a path"))
        };
        let vmlinux = last_word(&arguments);
        let kernel = Kernel::load(&vmlinux).expect("a kernel of ours can be read");
        let agent = std::fs::read(last_word(&["agent"])).expect("the agent is built");
        Self { vmlinux, kernel, agent }
    }

    pub(crate) fn run(
        &self,
        script: &Script,
        cpus: u32,
        deterministic: bool,
        observer: &mut dyn FrozenObserver,
    ) -> Run {
        let config = RunConfig {
            vmlinux: &self.vmlinux,
            agent: &self.agent,
            script_name: "test",
            script,
            memory_mib: None,
            cpus,
            deterministic,
            seed: 1,
            boot_limit: Duration::from_secs(120),
            keep: None,
        };
        run(&Qemu::Tcg, &config, Some(observer), &mut |_| {}).expect("it can be tried")
    }
}

/// One of our own scripts as text.
pub(crate) fn script(name: &str) -> String {
    let path = format!("{}/../guest-agent/scripts/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("a script")
}

/// A script by its text.
pub(crate) fn parse(text: &str) -> Script {
    Script::parse("test", text).expect("a script")
}
