//! The agent's messages, held to the plan: whatever is out of place means that the channel cannot be trusted.

use std::fmt;

use guest_agent::script::{Checkpoint, Step};
use guest_agent::wire::{Decoder, Message, PROTOCOL, ProcFile};

use super::{BatchBell, Phase};
use crate::observe::RawCheckpoint;

/// How far a guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The agent is not ready.
    Booting,
    /// The agent is ready, the first step follows at once.
    Ready,
    /// In this step of the plan, from 0.
    Running(usize),
    /// The agent has said its last word.
    Ended,
}

/// What is known of the doorbell in the step that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bell {
    /// No ring belongs to what follows.
    Silent,
    /// The step is a frozen checkpoint whose ring has not been announced.
    Due,
    /// The agent rings next, or has rung: until that is answered it can say nothing.
    Announced,
    /// The step runs batches, and the one of this number has not been announced.
    BatchDue(u32),
    /// The driver rings next, or has rung, for the batch of this number: until both rings are answered nothing is said,
    /// unless that the batch cannot be run.
    Batch(u32, Phase),
}

/// A ring that is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announced<'a> {
    /// By [`Message::Bell`].
    Checkpoint {
        /// The step, from 0.
        step: usize,
        /// The checkpoint.
        name: &'a str,
    },
    /// By [`Message::Batch`].
    Batch(BatchBell),
}

impl Announced<'_> {
    /// Whether nothing but a few instructions comes before the ring. Before the second one of a batch comes the batch, and
    /// an allocator that hangs in it is a finding.
    pub(super) fn is_next(self) -> bool {
        !matches!(self, Self::Batch(BatchBell { phase: Phase::After, .. }))
    }
}

impl fmt::Display for Announced<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checkpoint { name, .. } => write!(f, "checkpoint {name}"),
            Self::Batch(BatchBell { batch, phase, .. }) => write!(f, "batch {batch} ({phase:?})"),
        }
    }
}

/// What a step of the plan says at the channel.
#[derive(Debug)]
enum Says {
    /// That it begins.
    Nothing,
    /// A checkpoint.
    Checkpoint(Checkpoint),
    /// So many batches.
    Batches(u32),
}

/// Follows one guest's messages.
#[derive(Debug)]
pub(super) struct Follower {
    decoder: Decoder,
    taken: u64,
    plan: Vec<Says>,
    greeted: bool,
    progress: Progress,
    open: Option<RawCheckpoint>,
    bell: Bell,
    /// The file whose last part is still to come.
    partial: Option<ProcFile>,
    /// `uname -r`.
    pub(super) release: Option<String>,
    /// Checkpoints that are whole.
    pub(super) checkpoints: Vec<RawCheckpoint>,
    /// Why the agent gave up.
    pub(super) failed: Option<String>,
    /// The kernel's taint at the end.
    pub(super) tainted: Option<u64>,
    /// The guest's clock at its last word, in nanoseconds.
    pub(super) uptime_ns: u64,
}

impl Follower {
    pub(super) fn new(steps: &[Step]) -> Self {
        let plan = steps
            .iter()
            .map(|step| match step {
                Step::Checkpoint(checkpoint) => Says::Checkpoint(checkpoint.clone()),
                Step::Batches(batches) => Says::Batches(batches.count.get()),
                _ => Says::Nothing,
            })
            .collect();
        Self {
            decoder: Decoder::default(),
            taken: 0,
            plan,
            greeted: false,
            progress: Progress::Booting,
            open: None,
            bell: Bell::Silent,
            partial: None,
            release: None,
            checkpoints: Vec::new(),
            failed: None,
            tainted: None,
            uptime_ns: 0,
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress
    }

    /// Bytes taken so far.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Bytes that are no whole frame yet.
    pub(super) fn pending(&self) -> usize {
        self.decoder.pending()
    }

    /// What the agent has said that the doorbell rings for, if that is not answered.
    pub(super) fn announced(&self) -> Option<Announced<'_>> {
        match (self.bell, self.progress, &self.open) {
            (Bell::Announced, Progress::Running(step), Some(open)) => {
                Some(Announced::Checkpoint { step, name: &open.name })
            }
            (Bell::Batch(batch, phase), Progress::Running(step), _) => {
                Some(Announced::Batch(BatchBell { step, batch, phase }))
            }
            _ => None,
        }
    }

    /// Whether the step that runs still has batches to run.
    pub(super) fn in_batches(&self) -> bool {
        matches!(self.bell, Bell::BatchDue(_) | Bell::Batch(..))
    }

    /// The machine stood still and goes on; `again` with another batch after the one that ended.
    pub(super) fn answered(&mut self, again: bool) {
        self.bell = match self.bell {
            Bell::Batch(batch, Phase::After) if again => Bell::Batch(batch, Phase::After),
            Bell::Batch(batch, Phase::Before) => Bell::Batch(batch, Phase::After),
            Bell::Batch(batch, Phase::After) if batch + 1 < self.batches() => Bell::BatchDue(batch + 1),
            _ => Bell::Silent,
        };
    }

    /// Batches of the step that runs.
    fn batches(&self) -> u32 {
        match self.progress {
            Progress::Running(step) => match self.plan.get(step) {
                Some(Says::Batches(count)) => *count,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Takes the next bytes of the stream.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.taken += bytes.len() as u64;
        self.decoder.push(bytes);
        while let Some(message) = self.decoder.next_message().map_err(|error| error.to_string())? {
            self.message(message)?;
        }
        Ok(())
    }

    fn message(&mut self, message: Message) -> Result<(), String> {
        let next = match self.progress {
            Progress::Ready => Some(0),
            Progress::Running(step) if self.open.is_none() && !self.in_batches() => Some(step + 1),
            _ => None,
        };
        let refused =
            matches!(self.bell, Bell::Batch(_, Phase::Before)) && matches!(message, Message::Failed { .. });
        if matches!(self.bell, Bell::Announced | Bell::Batch(..)) && !refused {
            return Err(format!("{} came where the doorbell should have rung", kind(&message)));
        }
        match message {
            Message::Hello { protocol: PROTOCOL, release } if !self.greeted => {
                self.greeted = true;
                self.release = Some(release);
            }
            Message::Hello { protocol, .. } if protocol != PROTOCOL => {
                return Err(format!("the agent speaks protocol {protocol}, the host {PROTOCOL}"));
            }
            Message::Ready { uptime_ns } if self.greeted && self.progress == Progress::Booting => {
                self.uptime_ns = uptime_ns;
                self.progress = Progress::Ready;
            }
            Message::Step { index, uptime_ns } if next == Some(index as usize) => {
                self.begin(index as usize, uptime_ns)?;
            }
            Message::Bell { index } if self.running(index, Bell::Due) => self.bell = Bell::Announced,
            Message::Batch { index, batch }
                if self.progress == Progress::Running(index as usize)
                    && self.bell == Bell::BatchDue(batch) =>
            {
                self.bell = Bell::Batch(batch, Phase::Before);
            }
            Message::Proc { index, file, last, bytes } if self.running(index, Bell::Silent) => {
                self.part(file, last, &bytes)?
            }
            Message::Checkpoint { index, still, still_after_flags, missing: _ }
                if self.running(index, Bell::Silent) =>
            {
                if let Some(file) = self.partial {
                    return Err(format!("{} is not whole", file.path()));
                }
                let whole = self.open.take().ok_or("a checkpoint ends that never began")?;
                self.checkpoints.push(RawCheckpoint { still, still_after_flags, ..whole });
            }
            Message::Failed { text, .. } if self.failed.is_none() => {
                self.failed = Some(text);
                self.progress = Progress::Ended;
            }
            Message::End { steps, tainted, uptime_ns }
                if next == Some(self.plan.len()) && steps as usize == self.plan.len() =>
            {
                self.tainted = Some(tainted);
                self.uptime_ns = uptime_ns;
                self.progress = Progress::Ended;
            }
            other => return Err(format!("{} is out of place in {:?}", kind(&other), self.progress)),
        }
        Ok(())
    }

    fn running(&self, index: u32, bell: Bell) -> bool {
        self.open.is_some() && self.progress == Progress::Running(index as usize) && self.bell == bell
    }

    fn begin(&mut self, step: usize, uptime_ns: u64) -> Result<(), String> {
        let says = self.plan.get(step).ok_or("more steps than the plan has")?;
        let (open, bell) = match says {
            Says::Nothing => (None, Bell::Silent),
            Says::Checkpoint(Checkpoint { name, frozen }) => {
                let open = RawCheckpoint { name: name.to_string(), ..Default::default() };
                (Some(open), if *frozen { Bell::Due } else { Bell::Silent })
            }
            Says::Batches(_) => (None, Bell::BatchDue(0)),
        };
        (self.open, self.bell) = (open, bell);
        self.uptime_ns = uptime_ns;
        self.progress = Progress::Running(step);
        Ok(())
    }

    fn part(&mut self, file: ProcFile, last: bool, bytes: &[u8]) -> Result<(), String> {
        let open = self.open.as_mut().ok_or("a file outside any checkpoint")?;
        let goes_on = self.partial == Some(file);
        if !goes_on && (self.partial.is_some() || open.files.contains_key(&file)) {
            return Err(format!("a part of {} is out of place", file.path()));
        }
        // Bounded by the channel's length: the channel is never emptied.
        open.files.entry(file).or_default().extend_from_slice(bytes);
        self.partial = (!last).then_some(file);
        Ok(())
    }
}

fn kind(message: &Message) -> &'static str {
    match message {
        Message::Hello { .. } => "Hello",
        Message::Ready { .. } => "Ready",
        Message::Step { .. } => "Step",
        Message::Proc { .. } => "Proc",
        Message::Bell { .. } => "Bell",
        Message::Batch { .. } => "Batch",
        Message::Checkpoint { .. } => "Checkpoint",
        Message::Failed { .. } => "Failed",
        Message::End { .. } => "End",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_agent::script::Script;
    use guest_agent::wire::{HEADER_LEN, PAYLOAD_MAX, encode};

    fn follower() -> Follower {
        let text = "about = 'a'\n[[step]]\ncompact = {}\n[[step]]\ncheckpoint = 'c'\n";
        Follower::new(&Script::parse("t", text).unwrap().unroll("t", 512).unwrap())
    }

    fn good() -> Vec<Message> {
        vec![
            Message::Hello { protocol: PROTOCOL, release: "7.2.13".into() },
            Message::Ready { uptime_ns: 1 },
            Message::Step { index: 0, uptime_ns: 2 },
            Message::Step { index: 1, uptime_ns: 3 },
            Message::Proc { index: 1, file: ProcFile::Buddyinfo, last: false, bytes: b"Node ".to_vec() },
            Message::Proc { index: 1, file: ProcFile::Buddyinfo, last: true, bytes: b"0".to_vec() },
            Message::Checkpoint { index: 1, still: true, still_after_flags: true, missing: vec![] },
            Message::End { steps: 2, tainted: 0, uptime_ns: 9 },
        ]
    }

    fn follow(messages: &[Message]) -> Result<Follower, String> {
        follow_on(follower(), messages)
    }

    fn follow_on(mut follower: Follower, messages: &[Message]) -> Result<Follower, String> {
        let mut frame = vec![0; HEADER_LEN + PAYLOAD_MAX];
        for (seq, message) in (0..).zip(messages) {
            let len = encode(seq, message, &mut frame).unwrap();
            follower.take(&frame[..len])?;
        }
        Ok(follower)
    }

    #[test]
    fn a_good_run_gives_its_checkpoints() {
        let follower = follow(&good()).unwrap();
        assert_eq!(follower.progress(), Progress::Ended);
        assert_eq!(follower.tainted, Some(0));
        assert_eq!(follower.checkpoints.len(), 1);
        assert_eq!(follower.checkpoints[0].name, "c");
        assert_eq!(follower.checkpoints[0].files[&ProcFile::Buddyinfo], b"Node 0");
    }

    /// Frames are numbered by the sender, so a message that the agent never sent would not show in the numbers.
    #[test]
    fn no_message_can_be_left_out_or_come_twice() {
        for index in 0..good().len() - 1 {
            let mut messages = good();
            let message = messages.remove(index);
            // Of a file's parts only the last can be missed here; any other one leaves a gap in the frames' numbers.
            let is_part = matches!(message, Message::Proc { last: false, .. });
            if !is_part {
                assert!(follow(&messages).is_err(), "left out: {message:?}");
                messages.insert(index, message.clone());
                messages.insert(index, message.clone());
                assert!(follow(&messages).is_err(), "twice: {message:?}");
            }
        }
    }

    /// As [`good`], up to the ring and from it on.
    fn frozen() -> (Follower, Vec<Message>, Vec<Message>) {
        let text =
            "about = 'a'\n[[step]]\ncompact = {}\n[[step]]\ncheckpoint = { name = 'c', frozen = true }\n";
        let follower = Follower::new(&Script::parse("t", text).unwrap().unroll("t", 512).unwrap());
        let mut before = good();
        let after = before.split_off(4);
        before.push(Message::Bell { index: 1 });
        (follower, before, after)
    }

    #[test]
    fn a_frozen_checkpoint_rings_once_before_it_sends() {
        let (follower, before, after) = frozen();
        let mut follower = follow_on(follower, &before).unwrap();
        assert_eq!(follower.announced(), Some(Announced::Checkpoint { step: 1, name: "c" }));
        follower.answered(false);
        assert_eq!(follower.announced(), None);
        let mut frame = vec![0; HEADER_LEN + PAYLOAD_MAX];
        for (seq, message) in (before.len() as u32..).zip(&after) {
            let len = encode(seq, message, &mut frame).unwrap();
            follower.take(&frame[..len]).unwrap();
        }
        assert_eq!(follower.checkpoints.len(), 1);
        assert_eq!(follower.progress(), Progress::Ended);
    }

    #[test]
    fn a_bell_is_out_of_place_anywhere_else() {
        let (_, before, after) = frozen();
        let bell = before.last().unwrap().clone();
        // Where no step asks for it, at any point.
        for at in 0..=good().len() {
            let mut messages = good();
            messages.insert(at, bell.clone());
            assert!(follow(&messages).is_err(), "at {at}");
        }
        // Left out, and not waited for.
        let without = [&before[..4], &after].concat();
        assert!(follow_on(frozen().0, &without).is_err());
        let error = follow_on(frozen().0, &[before, after].concat()).unwrap_err();
        assert!(error.contains("should have rung"), "{error}");
    }

    fn batches() -> Follower {
        let text = "about = 'a'\n[[step]]\nbatches = { count = 2 }\n";
        Follower::new(&Script::parse("t", text).unwrap().unroll("t", 512).unwrap())
    }

    fn say(follower: &mut Follower, seq: &mut u32, message: &Message) -> Result<(), String> {
        let mut frame = vec![0; HEADER_LEN + PAYLOAD_MAX];
        let len = encode(*seq, message, &mut frame).unwrap();
        *seq += 1;
        follower.take(&frame[..len])
    }

    /// Up to the first batch's announcement.
    fn announced() -> (Follower, u32) {
        let (mut follower, mut seq) = (batches(), 0);
        for message in [
            Message::Hello { protocol: PROTOCOL, release: "7.2.13".into() },
            Message::Ready { uptime_ns: 1 },
            Message::Step { index: 0, uptime_ns: 2 },
            Message::Batch { index: 0, batch: 0 },
        ] {
            say(&mut follower, &mut seq, &message).unwrap();
        }
        (follower, seq)
    }

    const END: Message = Message::End { steps: 1, tainted: 0, uptime_ns: 9 };

    #[test]
    fn each_batch_rings_twice() {
        let (mut follower, mut seq) = announced();
        for batch in 0..2 {
            for phase in [Phase::Before, Phase::After] {
                let bell = BatchBell { step: 0, batch, phase };
                assert_eq!(follower.announced(), Some(Announced::Batch(bell)));
                follower.answered(false);
            }
            assert_eq!(follower.announced(), None);
            if batch == 0 {
                assert!(follower.in_batches());
                say(&mut follower, &mut seq, &Message::Batch { index: 0, batch: 1 }).unwrap();
            }
        }
        assert!(!follower.in_batches());
        say(&mut follower, &mut seq, &END).unwrap();
        assert_eq!(follower.progress(), Progress::Ended);
    }

    #[test]
    fn nothing_is_said_between_the_rings_of_a_batch_and_none_is_left_out() {
        let second = Message::Batch { index: 0, batch: 1 };
        for answered in 0..2 {
            for message in [&second, &END] {
                let (mut follower, mut seq) = announced();
                (0..answered).for_each(|_| follower.answered(false));
                say(&mut follower, &mut seq, message).unwrap_err();
            }
        }
        for message in [END, Message::Batch { index: 0, batch: 0 }, Message::Batch { index: 0, batch: 2 }] {
            let (mut follower, mut seq) = announced();
            follower.answered(false);
            follower.answered(false);
            say(&mut follower, &mut seq, &message).unwrap_err();
        }
    }

    #[test]
    fn a_batch_that_cannot_be_run_is_said_before_it_rings_and_not_later() {
        let failed = Message::Failed { index: Some(0), text: "busy".into() };
        let (mut follower, mut seq) = announced();
        say(&mut follower, &mut seq, &failed).unwrap();
        assert_eq!((follower.progress(), follower.announced()), (Progress::Ended, None));
        let (mut follower, mut seq) = announced();
        follower.answered(false);
        say(&mut follower, &mut seq, &failed).unwrap_err();
    }

    #[test]
    fn a_checkpoint_that_is_not_whole_does_not_count() {
        assert!(follow(&good()[..6]).unwrap().checkpoints.is_empty());
    }
}
