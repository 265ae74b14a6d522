//! Whether KVM here is worth using, by measuring it.
//!
//! `/dev/kvm` may open on a host whose KVM runs guest kernel code in an instruction emulator, at 1.8 million
//! instructions a second; no stock kernel boots there. So a loop of ring 0 code is run and timed.

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use memmap2::MmapMut;

/// Instructions a second below which KVM is not used.
pub const ENOUGH_PER_S: f64 = 50e6;
/// The probe's own time limit, for [`crate::process::Group::wait_until`]: a KVM that does not come back is not used.
pub const LIMIT: Duration = Duration::from_secs(5);

/// Times that the loop runs; two instructions each. 0.2 s under an emulator, about a millisecond on hardware.
const ROUNDS: u32 = 200_000;
const MEMORY_LEN: usize = 2 << 20;
/// Guest-physical addresses: page tables, the end of a stack, the code.
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xa000;
const PD: u64 = 0xb000;
const STACK: u64 = 0x8000;
const CODE: u64 = 0x10_0000;

/// Runs the loop and gives instructions a second.
///
/// # Errors
/// The reason, in words, why KVM cannot be used at all.
pub fn instructions_per_s() -> Result<f64, String> {
    let failed = |doing: &str| {
        let doing = doing.to_owned();
        move |error: kvm_ioctls::Error| format!("failed to {doing}: {error}")
    };
    // Declared first, so dropped last.
    let mut memory =
        MmapMut::map_anon(MEMORY_LEN).map_err(|error| format!("failed to map memory: {error}"))?;
    let kvm = Kvm::new().map_err(failed("open /dev/kvm"))?;
    let vm = kvm.create_vm().map_err(failed("create a VM"))?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY_LEN as u64,
        userspace_addr: memory.as_mut_ptr() as u64,
    };
    // SAFETY: the region is a private mapping of just this length, which lives until after the VM is gone: `vm` and the
    // vCPU are dropped before `memory`, and nothing else uses it while the guest runs.
    unsafe { vm.set_user_memory_region(region) }.map_err(failed("give the VM memory"))?;

    put(&mut memory, PML4, &(PDPT | 0x3).to_le_bytes());
    put(&mut memory, PDPT, &(PD | 0x3).to_le_bytes());
    // One present, writable page of 2 MiB at address 0.
    put(&mut memory, PD, &0x83_u64.to_le_bytes());
    // mov ecx, ROUNDS; dec rcx; jnz -5; hlt
    let [a, b, c, d] = ROUNDS.to_le_bytes();
    put(&mut memory, CODE, &[0xb9, a, b, c, d, 0x48, 0xff, 0xc9, 0x75, 0xfb, 0xf4]);

    let mut vcpu = vm.create_vcpu(0).map_err(failed("create a vCPU"))?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed("read the CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(failed("set the CPUID"))?;
    let mut sregs = vcpu.get_sregs().map_err(failed("read the registers"))?;
    // 64-bit mode: PE, ET, NE, PG; PAE; LME and LMA.
    sregs.cr3 = PML4;
    sregs.cr4 = 0x20;
    sregs.cr0 = 0x8000_0031;
    sregs.efer = 0x500;
    sregs.cs = segment(11, 1, 0, 0x8);
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss, &mut sregs.fs, &mut sregs.gs] {
        *data = segment(3, 0, 1, 0x10);
    }
    vcpu.set_sregs(&sregs).map_err(failed("set the registers"))?;
    let regs = kvm_regs { rip: CODE, rsp: STACK, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(failed("set the registers"))?;

    let start = Instant::now();
    match vcpu.run().map_err(failed("run the vCPU"))? {
        VcpuExit::Hlt => Ok(2.0 * f64::from(ROUNDS) / start.elapsed().as_secs_f64()),
        exit => Err(format!("the guest loop ended with {exit:?}")),
    }
}

fn put(memory: &mut MmapMut, at: u64, bytes: &[u8]) {
    let at = at as usize;
    memory[at..at + bytes.len()].copy_from_slice(bytes);
}

fn segment(kind: u8, long: u8, big: u8, selector: u16) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        l: long,
        db: big,
        g: 1,
        ..Default::default()
    }
}
