/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the host writes into the memory of a guest, and reads back: the batch.
 *
 * host/src/batch.rs is the same in Rust. Little endian, no padding; whoever
 * changes anything here changes BD_ABI with it.
 */
#ifndef _BUDDYDIFF_ABI_H
#define _BUDDYDIFF_ABI_H

#include <linux/types.h>

#define BD_MAGIC	0x3168637461626462ULL	/* "bdbatch1" */
#define BD_ABI		2

#define BD_OPS		16384	/* operations of a batch at most */
#define BD_SLOTS	65536	/* handles */
#define BD_SPLITS	1024	/* slots that are split at once, at most */
#define BD_MAX_ORDER	10	/* of x86-64 */
#define BD_RANGE_PAGES	262144	/* of a range at most: 1 GiB */

/* bd_op.kind */
enum {
	BD_ALLOC	= 1,	/* alloc_pages(gfp, order) on node a, any if -1 */
	BD_FREE		= 2,	/* __free_pages() by the order of the allocation */
	BD_SPLIT	= 3,	/* split_page(): pages of order 0 from then on */
	BD_FREE_PIECE	= 4,	/* page number a of a slot that is split */
	BD_DRAIN	= 5,	/* drain_local_pages(): all zones, this CPU */
	BD_NOLOCK_ALLOC	= 6,	/* alloc_pages_nolock(0, a, order), 7.x */
	BD_NOLOCK_FREE	= 7,	/* free_pages_nolock(), 7.x */

	/* From here on only in a batch that may sleep. */
	BD_CONTIG_ALLOC	= 8,	/* alloc_contig_range(): b pages from pfn a on */
	BD_CONTIG_FREE	= 9,	/* free_contig_range() */
	BD_ISOLATE	= 10,	/* start_isolate_page_range(): as BD_CONTIG_ALLOC */
	BD_UNISOLATE	= 11,	/* undo_isolate_page_range() */
	BD_DRAIN_ALL	= 12,	/* drain_all_pages(): all zones, all CPUs */
	BD_PCP_DISABLE	= 13,	/* zone_pcp_disable(): zone b of node a */
	BD_PCP_ENABLE	= 14,	/* zone_pcp_enable(): the one that is disabled */
};

struct bd_op {
	__u32 kind;
	__u32 order;	/* ALLOC, NOLOCK_ALLOC */
	__u32 gfp;	/* ALLOC, CONTIG_ALLOC */
	__u32 slot;	/* all but DRAIN, DRAIN_ALL, PCP_* */
	__u64 a;
	__u64 b;
};

/* bd_result.value: 0 or, of an allocation, the pfn; or one of these */
#define BD_FAILED	(-1)	/* no page */
#define BD_NO_SUCH	(-2)	/* this kernel has no such operation */
#define BD_SKIPPED	(-3)	/* not done: what it builds on failed before */

struct bd_result {
	__s64 value;
	__u64 tsc;	/* after the operation */
};

/* bd_batch.state */
enum {
	BD_IDLE		= 0,	/* there is nothing to run */
	BD_READY	= 1,	/* the host has written a batch, or another */
	BD_DONE		= 2,	/* it was run, results are there */
	BD_REFUSED	= 3,	/* nothing of it was run: see error */
};

/*
 * bd_batch.error: the operation that is wrong, its result says why, as one of
 * enum bd_wrong; or, where count is, this one.
 */
#define BD_BAD_COUNT	0xffffffffU

enum bd_wrong {
	BD_RIGHT	= 0,
	BD_BAD_KIND	= 1,
	BD_BAD_ORDER	= 2,
	BD_BAD_SLOT	= 3,	/* there is no such slot */
	BD_BAD_GFP	= 4,	/* may sleep, or is not one request */
	BD_BAD_NODE	= 5,	/* has no memory */
	BD_SLOT_FULL	= 6,
	BD_SLOT_EMPTY	= 7,
	BD_SLOT_SPLIT	= 8,	/* is to be freed piece by piece */
	BD_NOT_SPLIT	= 9,
	BD_BAD_PIECE	= 10,	/* there is no such piece, or it is free */
	BD_COMPOUND	= 11,	/* cannot be split */
	BD_TOO_MANY	= 12,	/* slots that are split at once */
	BD_MUST_SLEEP	= 13,	/* not in a batch that may not sleep */
	BD_OTHER_SLOT	= 14,	/* holds a range, or another kind of range */
	BD_BAD_RANGE	= 15,	/* not all of it is in one zone */
	BD_BAD_ZONE	= 16,	/* has no memory */
	BD_PCP_OFF	= 17,	/* the lists of a zone are disabled already */
	BD_PCP_ON	= 18,	/* no lists are disabled */
};

struct bd_batch {
	__u64 magic;
	__u32 abi;
	__u32 count;
	__u32 state;
	__u32 error;
	struct bd_op ops[BD_OPS];
	struct bd_result results[BD_OPS];
};

/* The host finds it by its symbol. */
extern struct bd_batch buddydiff_batch;

#endif
