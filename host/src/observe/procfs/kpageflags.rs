//! `/proc/kpageflags` (fs/proc/page.c, stable_page_flags()): one word a pfn.
//!
//! A checkpoint of a large guest has megabytes of words, so they are counted, not kept.

use super::ParseError;

/// Bits, from include/uapi/linux/kernel-page-flags.h.
const KPF_LRU: u32 = 5;
const KPF_SLAB: u32 = 7;
const KPF_BUDDY: u32 = 10;
const KPF_ANON: u32 = 12;
const KPF_HUGE: u32 = 17;
const KPF_NOPAGE: u32 = 20;
const KPF_THP: u32 = 22;
const KPF_PGTABLE: u32 = 26;
/// One past the highest bit that any of our kernels sets.
const BITS: u32 = 64;

/// Pages by what the kernel says of them. Guard pages look like pages without any flag: the kernel does not show them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageFlags {
    /// pfns covered, from 0.
    pub pfns: u64,
    /// Pages in free blocks: KPF_BUDDY is set for every page of one.
    pub buddy: u64,
    /// pfns without a struct page.
    pub no_page: u64,
    /// Pages on an LRU list.
    pub lru: u64,
    /// Slab pages.
    pub slab: u64,
    /// Anonymous pages.
    pub anon: u64,
    /// hugetlb pages.
    pub huge: u64,
    /// Pages of a transparent huge page; since 7.x of any large folio.
    pub thp: u64,
    /// Page tables.
    pub page_table: u64,
}

/// Counts the words.
///
/// # Errors
/// Where the file ends within a word.
pub fn parse(bytes: &[u8]) -> Result<PageFlags, ParseError> {
    let (words, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(ParseError::new(words.len() + 1, "a word of 8 bytes", &format!("{} bytes", rest.len())));
    }
    let mut of_bit = [0_u64; BITS as usize];
    for word in words {
        let mut word = u64::from_le_bytes(*word);
        while word != 0 {
            of_bit[word.trailing_zeros() as usize] += 1;
            word &= word - 1;
        }
    }
    let count = |bit: u32| of_bit[bit as usize];
    Ok(PageFlags {
        pfns: words.len() as u64,
        buddy: count(KPF_BUDDY),
        no_page: count(KPF_NOPAGE),
        lru: count(KPF_LRU),
        slab: count(KPF_SLAB),
        anon: count(KPF_ANON),
        huge: count(KPF_HUGE),
        thp: count(KPF_THP),
        page_table: count(KPF_PGTABLE),
    })
}
