//! Faults to plant in an image, so that each check can be shown to find what it is for. They go by the kernel's own
//! layouts and by what is on its lists, so the same ones fit the fake kernel and an image of a real one.

use std::cell::RefCell;

use super::class::{Kind, PageClass, Part};
use super::kernel::{Kernel, TypeScheme};
use super::memmap::{MemMap, word};
use super::ram::Ram;
use super::scan::ZoneBits;
use super::space::Space;
use super::{MigrateType, ReadError, State, Zone, nodes, space, zone_at};

/// Alters RAM, and can put back what was there.
pub struct Pen<'a> {
    ram: &'a Ram,
    before: RefCell<Vec<(u64, u64)>>,
}

impl<'a> Pen<'a> {
    /// For RAM in our own memory.
    #[must_use]
    pub fn new(ram: &'a Ram) -> Self {
        Self { ram, before: RefCell::new(Vec::new()) }
    }

    /// The word at a guest-physical address; 0 where there is no RAM.
    #[must_use]
    pub fn read(&self, address: u64) -> u64 {
        self.ram.word(address).unwrap_or(0)
    }

    /// Alters a word. Where there is no RAM it does nothing.
    pub fn u64(&self, address: u64, value: u64) {
        if let Some(before) = self.ram.word(address)
            && self.ram.plant(address, value)
        {
            self.before.borrow_mut().push((address, before));
        }
    }

    fn bits(&self, address: u64, mask: u64, value: u64) {
        let (at, shift) = (address & !7, 8 * (address & 7));
        self.u64(at, self.read(at) & !(mask << shift) | (value & mask) << shift);
    }

    /// Alters four bytes.
    pub fn u32(&self, address: u64, value: u32) {
        self.bits(address, u32::MAX.into(), value.into());
    }

    /// Alters a byte.
    pub fn u8(&self, address: u64, value: u8) {
        self.bits(address, u8::MAX.into(), value.into());
    }

    /// Puts everything back, last first.
    pub fn undo(&self) {
        for (address, value) in self.before.borrow_mut().drain(..).rev() {
            self.ram.plant(address, value);
        }
    }
}

/// What must come of a planted fault, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// One finding of this invariant.
    One(&'static str),
    /// Findings of this invariant: the links lead walks astray, and each list that they damage says so.
    Some(&'static str),
    /// The RAM cannot be read, and the error says where.
    Unreadable,
}

/// A fault to plant.
pub struct Plant {
    /// What it is.
    pub name: &'static str,
    /// What must come of it.
    pub expect: Expect,
    /// Plants it in a zone. None where this zone, or this kernel, does not have what it takes.
    act: fn(&Site<'_>, &Zone) -> Option<()>,
}

/// All faults. The first nine are what the reader was asked to find.
pub const PLANTS: [Plant; 49] = {
    use Expect::{One, Some, Unreadable};
    const fn plant(name: &'static str, expect: Expect, act: fn(&Site<'_>, &Zone) -> Option<()>) -> Plant {
        Plant { name, expect, act }
    }
    [
        plant("nr_free is off by one", One("I1"), nr_free),
        plant("a free page is on two lists", Some("I8"), on_two_lists),
        plant("a page is on a list of another type", One("I6"), wrong_type),
        plant("two buddies are not merged", One("I7"), unmerged),
        plant("a page on a free list is a guard", One("I12"), guard_listed),
        plant("the count of a CPU is off", One("I10"), pcp_count),
        plant("a free page is not marked", One("I8"), unmarked),
        plant("a pageblock is isolated", One("I11"), isolated),
        plant("a link does not lead back", One("I8"), bad_back_link),
        // One for each other invariant.
        plant("NR_FREE_PAGES is off", One("I2"), |site, zone| site.count_pages(zone, "NR_FREE_PAGES", 64)),
        plant("NR_FREE_CMA_PAGES is off", One("I3"), |site, zone| {
            site.count_pages(zone, "NR_FREE_CMA_PAGES", 64)
        }),
        plant("nr_free_highatomic is off", One("I4"), free_highatomic),
        plant("nr_reserved_highatomic is off", One("I5"), reserved_highatomic),
        plant("NR_FREE_PAGES_BLOCKS is off", One("I9"), |site, zone| {
            site.count_pages(zone, "NR_FREE_PAGES_BLOCKS", 64)
        }),
        plant("a page is managed that is not there", One("I13"), managed),
        plant("a free page keeps what its last owner left", One("I14"), |site, zone| {
            let (.., pfn) = site.free(zone, 1, 10)?;
            site.set(pfn + 1, site.kernel.page.private, 0x1234)
        }),
        // More of I6 to I12.
        plant("a pageblock has another type", One("I6"), wrong_block_type),
        plant("a link back is missing at the end of a list", One("I8"), bad_tail),
        plant("a page holds another order", One("I8"), wrong_order),
        plant("a page holds an order that does not exist", One("I8"), |site, zone| {
            site.set(site.free(zone, 0, 10)?.2, site.kernel.page.private, 15)
        }),
        plant("a page is marked and on no list", One("I8"), unlisted),
        plant("a free page has a reference", One("I8"), referenced),
        plant("all pages of a free block have references", One("I8"), all_referenced),
        plant("a page inside a free block is marked", One("I8"), |site, zone| {
            let (order, _, pfn) = site.free(zone, 2, 10)?;
            site.mark(pfn + (1 << order) - 1, Sign::Buddy)
        }),
        plant("a page inside a free block is a guard", One("I8"), |site, zone| {
            let (order, _, pfn) = site.free(zone, 2, 10)?;
            site.mark(pfn + (1 << order) - 1, Sign::Guard)
        }),
        plant("a free block is inside another one", One("I8"), inner),
        plant("a free block is not aligned", One("I8"), misaligned),
        plant("a free block reaches out of the zone", One("I8"), out_of_zone),
        plant("a page on a free list has the flags of another zone", One("I8"), |site, zone| {
            let (.., pfn) = site.free(zone, 0, 10)?;
            let bits = ZoneBits::derive(site.kernel, site.map, &site.state.zones).ok()?;
            let flags = site.word(pfn, site.kernel.page.flags)?;
            site.set(pfn, site.kernel.page.flags, bits.of_other_zone(flags))
        }),
        plant("nr_isolate_pageblock is off", One("I11"), |site, zone| {
            site.add(site.zone(zone)? + site.kernel.zone.isolated? as u64, 1)
        }),
        plant("a pageblock is isolated and counted", One("I11"), |site, zone| {
            site.add(site.zone(zone)? + site.kernel.zone.isolated? as u64, 1)?;
            isolated(site, zone)
        }),
        plant("free pages are on an ISOLATE list", One("I11"), isolate_list),
        plant("a page on a per-CPU list is marked", One("I10"), |site, zone| {
            site.mark(site.held(zone)?.1, Sign::Buddy)
        }),
        plant("a page on a per-CPU list has a reference", One("I10"), |site, zone| {
            site.add_reference(site.held(zone)?.1)
        }),
        plant("a link of a per-CPU list leads nowhere", One("I10"), |site, zone| {
            let (_, pfn) = site.held(zone)?;
            site.set(pfn, site.kernel.page.list, 0x10)
        }),
        plant("a guard page is too large", One("I12"), |site, zone| {
            let order = site.state.guard_minorder;
            site.guard(site.allocated(zone, order + 1)?, order, order.into())
        }),
        plant("a guard page is not merged with its buddy", One("I12"), |site, zone| {
            let most = site.state.guard_minorder.checked_sub(1)?;
            let (order, _, pfn) = site.free(zone, 0, most)?;
            site.guard(pfn ^ 1 << order, order, order.into())
        }),
        plant("a guard page holds an order that does not exist", One("I12"), |site, zone| {
            site.guard(site.allocated(zone, 0)?, 0, 15)
        }),
        // Whatever a guest may do to its memory.
        plant("a list is a circle", One("I8"), |site, zone| {
            let (.., pfn) = site.free(zone, 0, 10)?;
            site.set(pfn, site.kernel.page.list, site.node(pfn)?)
        }),
        plant("a link leads nowhere", One("I8"), |site, zone| {
            let (.., pfn) = site.free(zone, 0, 10)?;
            site.set(pfn, site.kernel.page.list, 0xdead_0000_0000_0100)
        }),
        plant("a link leads between struct pages", One("I8"), |site, zone| {
            let (.., pfn) = site.free(zone, 0, 10)?;
            site.set(pfn, site.kernel.page.list, site.node(pfn)? + 8)
        }),
        plant("a list head leads nowhere", One("I8"), |site, zone| {
            let (order, number, _) = site.free(zone, 0, 10)?;
            site.write(site.head(zone, order, number)?, 8)
        }),
        plant("a link leads to another zone", One("I8"), other_zone),
        plant("a link leads to the end of RAM", One("I8"), |site, zone| {
            let (.., pfn) = site.free(zone, 0, 10)?;
            let last = (zone.end() == site.end()).then(|| zone.end() - 1)?;
            site.set(pfn, site.kernel.page.list, site.node(last)?)
        }),
        plant("a zone is larger than RAM", Unreadable, |site, zone| {
            site.write(site.zone(zone)? + site.kernel.zone.spanned as u64, 1 << 52)
        }),
        plant("a zone begins at the end of numbers", Unreadable, |site, zone| {
            site.write(site.zone(zone)? + site.kernel.zone.start_pfn as u64, u64::MAX)
        }),
        plant("the memory sections are nowhere", Unreadable, |site, _| {
            let symbol = site.kernel.symbol("mem_section")?;
            site.write(symbol.address, 0x1000)
        }),
        plant("a page table leads to itself", Unreadable, |site, _| {
            let top = site.kernel.symbol("init_top_pgt")?.address;
            let physical = site.space.translate(top)?;
            (0..512).for_each(|index| site.pen.u64(physical + index * 8, physical | 1));
            Option::Some(())
        }),
        plant("a page table leads out of RAM", Unreadable, |site, _| {
            let physical = site.space.translate(site.kernel.symbol("init_top_pgt")?.address)?;
            (0..512).for_each(|index| site.pen.u64(physical + index * 8, 0x000f_ffff_ffff_f001));
            Option::Some(())
        }),
    ]
};

/// What came of a fault that was planted.
#[derive(Debug)]
pub struct Outcome {
    /// The fault.
    pub name: &'static str,
    /// What had to come of it.
    pub expect: Expect,
    /// Invariants and their words, or why nothing could be read. None where the image has no place for this fault.
    pub found: Option<Result<Vec<(&'static str, String)>, ReadError>>,
}

impl Outcome {
    /// Whether that came which had to, and nothing else.
    #[must_use]
    pub fn is_right(&self) -> bool {
        match (&self.found, self.expect) {
            (None, _) | (Some(Err(_)), Expect::Unreadable) => true,
            (Some(Ok(found)), Expect::One(name)) => found.len() == 1 && found[0].0 == name,
            (Some(Ok(found)), Expect::Some(name)) => {
                !found.is_empty() && found.iter().all(|(other, _)| *other == name)
            }
            (Some(_), _) => false,
        }
    }
}

/// Plants each fault in turn in the first zone that has a place for it, and takes it out again. `look` sees what can be read
/// meanwhile; nothing where there is no place for the fault. `ram` must be in our own memory, and nothing be wrong with it.
///
/// # Errors
/// Where the image cannot be read as it is.
pub fn each(
    kernel: &Kernel,
    ram: &Ram,
    mut look: impl FnMut(&Plant, Option<Result<State, ReadError>>),
) -> Result<(), ReadError> {
    let state = State::read(kernel, ram)?;
    let space = space(kernel, ram)?;
    let map = MemMap::read(kernel, &space)?;
    let site = Site { kernel, state: &state, space: &space, map: &map, pen: Pen::new(ram) };
    for plant in &PLANTS {
        let planted = state.zones.iter().any(|zone| {
            let done = (plant.act)(&site, zone).is_some();
            if !done {
                site.pen.undo();
            }
            done
        });
        look(plant, planted.then(|| State::read(kernel, ram)));
        site.pen.undo();
    }
    Ok(())
}

/// Plants each fault in turn as [`each`] does, and checks what came of it.
///
/// # Errors
/// Where the image cannot be read as it is.
pub fn plant_each(kernel: &Kernel, ram: &Ram) -> Result<Vec<Outcome>, ReadError> {
    let mut outcomes = Vec::new();
    each(kernel, ram, |Plant { name, expect, .. }, state| {
        let found = state.map(|state| state.map(|state| findings(&state)));
        outcomes.push(Outcome { name, expect: *expect, found });
    })?;
    Ok(outcomes)
}

fn findings(state: &State) -> Vec<(&'static str, String)> {
    let broken = state.zones.iter().flat_map(|zone| crate::check::frozen::check(state, zone));
    broken.map(|broken| (broken.invariant, broken.text)).collect()
}

/// Marks of a page, as far as faults are about them.
#[derive(Clone, Copy)]
enum Sign {
    None,
    Buddy,
    Guard,
}

/// An image to plant faults in, and what is known of it.
struct Site<'a> {
    kernel: &'a Kernel,
    state: &'a State,
    space: &'a Space<'a>,
    map: &'a MemMap<'a>,
    pen: Pen<'a>,
}

impl Site<'_> {
    /// Only where free pages keep to lists of their block's type it is a fault that they do not.
    fn needs_hygiene(&self) -> Option<()> {
        self.state.hygiene.then_some(())
    }

    /// Virtual address of a zone.
    fn zone(&self, zone: &Zone) -> Option<u64> {
        let of_node =
            |node: &u64| self.space.u32(node.wrapping_add(self.kernel.node.id as u64)) == Some(zone.node);
        let node = nodes(self.kernel, self.space).ok()?.into_iter().find(of_node)?;
        Some(zone_at(self.kernel, node, zone.index))
    }

    /// First pfn above RAM.
    fn end(&self) -> u64 {
        self.state.zones.iter().map(Zone::end).max().unwrap_or(0)
    }

    /// Virtual address of a free area, and of the head of one of its lists.
    fn area(&self, zone: &Zone, order: u32) -> Option<u64> {
        Some(self.zone(zone)? + (self.kernel.zone.free_area + order as usize * self.kernel.area.bytes) as u64)
    }

    fn head(&self, zone: &Zone, order: u32, number: usize) -> Option<u64> {
        Some(self.area(zone, order)? + (self.kernel.area.lists + number * 16) as u64)
    }

    fn write(&self, address: u64, value: u64) -> Option<()> {
        self.pen.u64(self.space.translate(address)?, value);
        Some(())
    }

    fn add(&self, address: u64, count: i64) -> Option<()> {
        self.write(address, self.space.u64(address)?.wrapping_add_signed(count))
    }

    /// Adds pages to a counter of the zone.
    fn count_pages(&self, zone: &Zone, name: &str, pages: i64) -> Option<()> {
        let number = zone.counter_number(name)? as u64;
        self.add(self.zone(zone)? + self.kernel.zone.vm_stat as u64 + number * 8, pages)
    }

    /// Adds to `nr_free` of an order.
    fn count(&self, zone: &Zone, order: u32, blocks: i64) -> Option<()> {
        self.add(self.area(zone, order)? + self.kernel.area.nr_free as u64, blocks)
    }

    /// Order, list and first pfn of each free block. Not of HIGHATOMIC or CMA pages, which are counted apart.
    fn blocks(&self, zone: &Zone) -> impl Iterator<Item = (u32, usize, u64)> {
        let areas = zone.areas.iter().enumerate();
        let all = areas.flat_map(|(order, area)| {
            let lists = area.lists.iter().enumerate();
            lists.flat_map(move |(number, list)| {
                list.pfns.iter().map(move |pfn| (order as u32, number, u64::from(*pfn)))
            })
        });
        let plain = [MigrateType::Movable, MigrateType::Unmovable, MigrateType::Reclaimable];
        all.filter(move |(_, number, _)| plain.contains(&self.state.types[*number]))
    }

    /// The first of some orders.
    fn free(&self, zone: &Zone, least: u32, most: u32) -> Option<(u32, usize, u64)> {
        self.blocks(zone).find(|(order, ..)| (least..=most).contains(order))
    }

    /// CPU and pfn of a page at the end of a per-CPU list.
    fn held(&self, zone: &Zone) -> Option<(usize, u64)> {
        let lists = |cpu: &super::Cpu| cpu.pcp.lists.iter().find_map(|list| list.pfns.last().copied());
        zone.cpus.iter().find_map(|cpu| Some((cpu.number, lists(cpu)?.into())))
    }

    /// First pfn of an aligned run of allocated pages that are no part of compound pages.
    fn allocated(&self, zone: &Zone, order: u32) -> Option<u64> {
        let run = 1_u64 << order;
        let plain = |pfn: u64| {
            let class = zone.class(pfn);
            class.is_some_and(|class| class.kind() == Kind::Other && class.part() == Part::Single)
        };
        let starts = (zone.start.next_multiple_of(run)..).step_by(run as usize);
        starts.take_while(|pfn| pfn + run <= zone.end()).find(|pfn| (*pfn..pfn + run).all(plain))
    }

    fn word(&self, pfn: u64, index: usize) -> Option<u64> {
        Some(word(self.map.page(pfn)?, index))
    }

    /// Alters a word of a struct page.
    fn set(&self, pfn: u64, index: usize, value: u64) -> Option<()> {
        self.write(self.map.address(pfn)? + index as u64 * 8, value)
    }

    fn mark(&self, pfn: u64, sign: Sign) -> Option<()> {
        let kind = self.word(pfn, self.kernel.page.kind)?;
        let value = match (self.kernel.page.scheme, sign) {
            (_, Sign::None) => u32::MAX,
            (TypeScheme::Byte { buddy, .. }, Sign::Buddy) => u32::from(buddy) << 24,
            (TypeScheme::Byte { guard, .. }, Sign::Guard) => u32::from(guard) << 24,
            (TypeScheme::Bits, Sign::Buddy) => !0x80,
            (TypeScheme::Bits, Sign::Guard) => !0x400,
        };
        self.set(pfn, self.kernel.page.kind, kind & !u64::from(u32::MAX) | u64::from(value))
    }

    fn add_reference(&self, pfn: u64) -> Option<()> {
        let kind = self.word(pfn, self.kernel.page.kind)?;
        self.set(pfn, self.kernel.page.kind, kind.wrapping_add(1 << 32))
    }

    fn drop_references(&self, pfn: u64) -> Option<()> {
        let kind = self.word(pfn, self.kernel.page.kind)?;
        self.set(pfn, self.kernel.page.kind, kind & u64::from(u32::MAX))
    }

    /// Virtual address of a page's list node.
    fn node(&self, pfn: u64) -> Option<u64> {
        Some(self.map.address(pfn)? + self.kernel.page.list as u64 * 8)
    }

    /// Takes a page off its list.
    fn unlink(&self, pfn: u64) -> Option<()> {
        let node = self.node(pfn)?;
        let (next, previous) = (self.space.u64(node)?, self.space.u64(node + 8)?);
        self.write(previous, next)?;
        self.write(next + 8, previous)
    }

    /// Puts a page at the head of a list.
    fn link(&self, head: u64, pfn: u64) -> Option<()> {
        let (node, first) = (self.node(pfn)?, self.space.u64(head)?);
        self.write(node, first)?;
        self.write(node + 8, head)?;
        self.write(head, node)?;
        self.write(first + 8, node)
    }

    /// Makes allocated pages a guard page of `order` that holds `held`.
    fn guard(&self, pfn: u64, order: u32, held: u64) -> Option<()> {
        for pfn in pfn..pfn + (1 << order) {
            self.drop_references(pfn)?;
            self.set(pfn, self.kernel.page.private, 0)?;
        }
        self.set(pfn, self.kernel.page.private, held)?;
        self.mark(pfn, Sign::Guard)
    }

    /// Gives the pageblock of `pfn` other bits.
    fn set_block(&self, pfn: u64, bits: u8) -> Option<()> {
        let (address, shift) = self.map.block_word(self.kernel, pfn, self.state.pageblock_order)?;
        let mask = ((1 << self.kernel.section.block_bits) - 1) << shift;
        self.write(address, self.space.u64(address)? & !mask | u64::from(bits) << shift)
    }

    /// Another plain type than that of this list.
    fn other_type(&self, number: usize) -> Option<usize> {
        let other = if self.state.types.get(number) == Some(&MigrateType::Movable) {
            MigrateType::Unmovable
        } else {
            MigrateType::Movable
        };
        self.kernel.type_number(other)
    }
}

fn nr_free(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.count(zone, site.free(zone, 0, 10)?.0, 1)
}

/// list_add() without list_del().
fn on_two_lists(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (order, number, pfn) = site.free(zone, 0, 10)?;
    site.link(site.head(zone, order, site.other_type(number)?)?, pfn)
}

fn wrong_type(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.needs_hygiene()?;
    let (order, number, pfn) = site.free(zone, 0, 10)?;
    site.unlink(pfn)?;
    site.link(site.head(zone, order, site.other_type(number)?)?, pfn)
}

fn wrong_block_type(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.needs_hygiene()?;
    let (_, number, pfn) = site.free(zone, 0, 10)?;
    site.set_block(pfn, site.other_type(number)? as u8)
}

/// A free block is split, and its halves are not merged again.
fn unmerged(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (order, number, pfn) = site.free(zone, 1, site.state.pageblock_order - 1)?;
    let half = order - 1;
    site.unlink(pfn)?;
    site.count(zone, order, -1)?;
    site.count(zone, half, 2)?;
    for pfn in [pfn, pfn + (1 << half)] {
        site.link(site.head(zone, half, number)?, pfn)?;
        site.mark(pfn, Sign::Buddy)?;
        site.set(pfn, site.kernel.page.private, half.into())?;
    }
    Some(())
}

fn guard_listed(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.mark(site.free(zone, 0, 10)?.2, Sign::Guard)
}

fn pcp_count(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let pageset = site.space.u64(site.zone(zone)? + site.kernel.zone.pageset as u64)?;
    let offset =
        site.kernel.symbol("__per_cpu_offset").map_or(Some(0), |offsets| site.space.u64(offsets.address))?;
    let count = pageset.wrapping_add(offset).wrapping_add(site.kernel.pcp.count as u64);
    let physical = site.space.translate(count)?;
    site.pen.u32(physical, site.space.u32(count)?.wrapping_add(2));
    Some(())
}

fn unmarked(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.mark(site.free(zone, 0, 10)?.2, Sign::None)
}

fn isolated(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.kernel.zone.isolated?;
    let (_, number, pfn) = site.free(zone, 0, 10)?;
    let isolate = site.kernel.type_number(MigrateType::Isolate)?;
    match site.kernel.section.isolate_bit {
        Some(bit) => site.set_block(pfn, number as u8 | 1 << bit),
        None => site.set_block(pfn, isolate as u8),
    }
}

fn bad_back_link(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (.., pfn) = site.free(zone, 0, 10)?;
    site.set(pfn, site.kernel.page.list + 1, site.node(pfn)?)
}

fn bad_tail(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (order, number, pfn) = site.free(zone, 0, 10)?;
    let head = site.head(zone, order, number)?;
    // Where the list has one block only, the head leads back to it.
    let previous = zone.areas[order as usize].lists[number].pfns.len() > 1;
    site.write(head + 8, if previous { site.node(pfn)? } else { head })
}

fn free_highatomic(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.kernel.type_number(MigrateType::HighAtomic)?;
    site.add(site.zone(zone)? + site.kernel.zone.free_highatomic? as u64, 64)
}

fn reserved_highatomic(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.kernel.type_number(MigrateType::HighAtomic)?;
    let pages = site.state.pageblock_pages().cast_signed();
    site.add(site.zone(zone)? + site.kernel.zone.reserved_highatomic as u64, pages)
}

fn managed(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.add(site.zone(zone)? + site.kernel.zone.managed as u64, 1)
}

fn wrong_order(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (order, _, pfn) = site.free(zone, 1, 10)?;
    site.set(pfn, site.kernel.page.private, u64::from(order) - 1)
}

/// An allocated page that is marked as free: counts and lists know nothing of it.
fn unlisted(site: &Site<'_>, zone: &Zone) -> Option<()> {
    // Its buddy is allocated too.
    let pfn = site.allocated(zone, 1)?;
    site.drop_references(pfn)?;
    site.set(pfn, site.kernel.page.private, 0)?;
    site.mark(pfn, Sign::Buddy)
}

fn referenced(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.add_reference(site.free(zone, 0, 10)?.2)
}

/// A thousand bad pages.
fn all_referenced(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let list = zone.areas.get(10)?.lists.iter().find_map(|list| list.pfns.first())?;
    (0..1 << 10).try_for_each(|index| site.add_reference(u64::from(*list) + index))
}

/// A page of a free block is freed once more.
fn inner(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let (_, number, pfn) = site.free(zone, 2, 10)?;
    let page = pfn + 1;
    site.mark(page, Sign::Buddy)?;
    site.set(page, site.kernel.page.private, 0)?;
    site.count(zone, 0, 1)?;
    site.count_pages(zone, "NR_FREE_PAGES", 1)?;
    site.link(site.head(zone, 0, number)?, page)
}

/// A free block that begins a page too late.
fn misaligned(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let has_room = |(order, _, pfn): &(u32, usize, u64)| {
        *order > 0 && zone.class(pfn + (1 << order)) == Some(PageClass::new(Kind::Other, Part::Single, 0))
    };
    let (order, number, pfn) = site.blocks(zone).find(has_room)?;
    site.unlink(pfn)?;
    site.mark(pfn, Sign::None)?;
    site.add_reference(pfn)?;
    let (moved, last) = (pfn + 1, pfn + (1 << order));
    site.drop_references(last)?;
    site.set(last, site.kernel.page.private, 0)?;
    site.mark(moved, Sign::Buddy)?;
    site.set(moved, site.kernel.page.private, order.into())?;
    site.link(site.head(zone, order, number)?, moved)
}

/// The last page of the zone becomes a free block of order 10, in place of one that was.
fn out_of_zone(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let last = zone.end().checked_sub(1)?;
    let whole = (0..11).find_map(|order| {
        let first = last + 1 - (1 << order);
        let class = zone.class(first)?;
        (class.kind() == Kind::Free && class.part() == Part::Head && class.order() == order).then_some(first)
    })?;
    let (order, number) = (zone.class(whole)?.order(), zone.class(whole)?.list());
    if order == 0 {
        return None;
    }
    // It begins in the middle of itself.
    let moved = whole + (1 << (order - 1));
    site.unlink(whole)?;
    site.mark(whole, Sign::None)?;
    (whole..moved).try_for_each(|pfn| site.add_reference(pfn))?;
    site.mark(moved, Sign::Buddy)?;
    site.set(moved, site.kernel.page.private, order.into())?;
    site.link(site.head(zone, order, number)?, moved)
}

/// Pages of a pageblock that is not isolated are on a list of isolated ones.
fn isolate_list(site: &Site<'_>, zone: &Zone) -> Option<()> {
    site.needs_hygiene()?;
    let isolate = site.kernel.type_number(MigrateType::Isolate)?;
    let (order, _, pfn) = site.free(zone, 0, 4)?;
    site.unlink(pfn)?;
    site.link(site.head(zone, order, isolate)?, pfn)?;
    // These pages do not count as free ones.
    site.count_pages(zone, "NR_FREE_PAGES", -(1 << order))
}

fn other_zone(site: &Site<'_>, zone: &Zone) -> Option<()> {
    let other = site.state.zones.iter().find(|other| other.start != zone.start)?;
    let (_, _, theirs) = site.free(other, 0, 10)?;
    let (.., pfn) = site.free(zone, 0, 10)?;
    site.set(pfn, site.kernel.page.list, site.node(theirs)?)
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;

    #[test]
    fn each_planted_fault_is_found_and_nothing_else() {
        let kernel = fake::kernel();
        let ram = fake::ram(&kernel, 16);
        let outcomes = plant_each(&kernel, &ram).expect("it can be read");
        let wrong: Vec<&Outcome> = outcomes.iter().filter(|outcome| !outcome.is_right()).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        let idle: Vec<&str> =
            outcomes.iter().filter(|outcome| outcome.found.is_none()).map(|outcome| outcome.name).collect();
        assert_eq!(idle, [""; 0], "faults for which the fake image has no place");
        for (name, _) in crate::check::frozen::INVARIANTS {
            assert!(PLANTS.iter().any(|plant| plant.expect == Expect::One(name)), "{name} cannot fail");
        }
        // All was put back.
        assert_eq!(findings(&State::read(&kernel, &ram).expect("it can be read")), []);
    }
}
