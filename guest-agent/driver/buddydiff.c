// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs batches of page allocator operations that a host writes into our memory.
 *
 * A byte 'r' written to /proc/buddydiff runs a batch, with interrupts off and
 * every other CPU held: it rings the host's doorbell, and the machine stands
 * still while the host looks at memory and writes a batch; it runs the batch and
 * rings again, for the host to look at memory and results. In between nothing
 * but the batch touches the allocator. Where the host has written another batch
 * by then, that is run in the same way, so nothing comes between the two.
 *
 * A byte 's' runs one that may sleep: the other CPUs are held and interrupts are
 * off while the host looks, and not while the batch runs, so others move in the
 * allocator meanwhile. A byte 'q' frees all that is held.
 *
 * After init nothing here allocates anything but what a batch asks for.
 */
#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/build_bug.h>
#include <linux/delay.h>
#include <linux/errno.h>
#include <linux/init.h>
#include <linux/irqflags.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/proc_fs.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/timex.h>
#include <linux/uaccess.h>

#include "buddydiff-abi.h"
#include "buddydiff-compat.h"

/* The doorbell: BELL_PORT and BELL_RING of guest-agent/src/wire.rs. */
#define BD_BELL_PORT	0x505
#define BD_BELL_RING	1

/* What is known of a slot, beside its order. */
#define BD_INFO_FULL	 0x80
#define BD_INFO_COMPOUND 0x40
#define BD_INFO_SPLIT	 0x20
#define BD_INFO_RANGE	 0x10	/* and which, in place of the order */
#define BD_INFO_ORDER	 0x0f

/* What a slot with BD_INFO_RANGE holds. */
#define BD_RANGE_CONTIG	 0
#define BD_RANGE_ISOLATE 1

/* Microseconds to wait for the other CPUs, and how often. */
#define BD_HOLD_US	1000000
#define BD_HOLD_TRIES	20

/* GFP flags that a batch may have, see bd_bad_gfp(). */
#define BD_GFP_KNOWN (__GFP_DMA | __GFP_HIGHMEM | __GFP_DMA32 | __GFP_MOVABLE | \
		      __GFP_RECLAIMABLE | __GFP_HIGH | __GFP_IO | __GFP_FS |	\
		      __GFP_ZERO | __GFP_KSWAPD_RECLAIM | __GFP_WRITE |		\
		      __GFP_NOWARN | __GFP_RETRY_MAYFAIL | __GFP_NORETRY |	\
		      __GFP_MEMALLOC | __GFP_COMP | __GFP_NOMEMALLOC |		\
		      __GFP_HARDWALL | __GFP_THISNODE)

/* Which pieces of a slot are free already. */
struct bd_split {
	u16 next;	/* the next that is unused */
	u16 left;	/* pieces that are not free */
	DECLARE_BITMAP(freed, 1 << BD_MAX_ORDER);
};

/* All that is known of the slots but their pages. */
struct bd_table {
	u8 info[BD_SLOTS];
	u16 split_of[BD_SLOTS];
	struct bd_split splits[BD_SPLITS];
	u16 unused;	/* the first split that is, or BD_SPLITS */
	bool pcp_off;	/* whether bd_pcp_zone is */
};

struct bd_batch buddydiff_batch __aligned(PAGE_SIZE);

static struct page *bd_slots[BD_SLOTS];
static u32 bd_pages[BD_SLOTS];	/* of a range */
static struct zone *bd_pcp_zone;
static struct bd_table bd_table;
/* What bd_table will be if all of a batch that can fail succeeds. */
static struct bd_table bd_ahead;
static DEFINE_MUTEX(bd_mutex);

/*
 * The jump: an emulator may run the instructions up to the next one before it
 * stops the machine.
 */
static void bd_ring(void)
{
	asm volatile("outb %0, %1\n\t"
		     "jmp 1f\n"
		     "1:"
		     : : "a" ((u8)BD_BELL_RING), "d" ((u16)BD_BELL_PORT) : "memory");
}

static void bd_clear(struct bd_table *table)
{
	int i;

	memset(table, 0, sizeof(*table));
	for (i = 0; i < BD_SPLITS; i++)
		table->splits[i].next = i + 1;
}

/*
 * Whether flags may sleep where that is not allowed, or are not one request: two
 * zones (GFP_ZONE_BAD) or two mobilities, which would read as a free list of no
 * type that can be asked for. What charges, retries for ever or is not the same
 * in all kernels is left out. Those that sleep must give up rather than kill.
 */
static bool bd_bad_gfp(gfp_t gfp, bool sleeps)
{
	gfp_t zones = gfp & (__GFP_DMA | __GFP_HIGHMEM | __GFP_DMA32);
	gfp_t mobility = gfp & (__GFP_MOVABLE | __GFP_RECLAIMABLE);

	if (sleeps && (gfp & (__GFP_NORETRY | __GFP_RETRY_MAYFAIL)))
		gfp &= ~__GFP_DIRECT_RECLAIM;
	if (gfp & ~BD_GFP_KNOWN)
		return true;
	if ((__force u32)zones & ((__force u32)zones - 1))
		return true;
	return mobility == (__GFP_MOVABLE | __GFP_RECLAIMABLE);
}

static bool bd_bad_node(u64 a)
{
	s64 nid = (s64)a;

	if (nid == NUMA_NO_NODE)
		return false;
	return nid < 0 || nid >= MAX_NUMNODES || !node_state(nid, N_MEMORY);
}

static struct zone *bd_zone(const struct bd_op *op)
{
	struct zone *zone;

	if ((s64)op->a < 0 || bd_bad_node(op->a) || op->b >= MAX_NR_ZONES)
		return NULL;
	zone = &NODE_DATA(op->a)->node_zones[op->b];
	return populated_zone(zone) ? zone : NULL;
}

/* Whether every page of a range exists and is in the same zone. */
static bool bd_bad_range(const struct bd_op *op)
{
	unsigned long pfn, end = op->a + op->b;
	struct zone *zone = NULL;
	struct page *page;

	if (!op->b || op->b > BD_RANGE_PAGES || op->a >= 1ULL << 52)
		return true;
	for (pfn = op->a; pfn < end; pfn++) {
		page = pfn_to_online_page(pfn);
		if (!page || (zone && page_zone(page) != zone))
			return true;
		zone = page_zone(page);
	}
	return false;
}

/* The same as bd_check() for what only a batch that may sleep has. */
static enum bd_wrong bd_check_sleeping(const struct bd_table *table,
				       const struct bd_op *op, bool sleeps)
{
	unsigned int range = op->kind == BD_CONTIG_FREE ? BD_RANGE_CONTIG : BD_RANGE_ISOLATE;
	gfp_t gfp = (__force gfp_t)op->gfp;
	u8 info;

	if (!sleeps)
		return BD_MUST_SLEEP;
	switch (op->kind) {
	case BD_DRAIN_ALL:
		return BD_RIGHT;
	case BD_PCP_DISABLE:
		if (!bd_zone(op))
			return BD_BAD_ZONE;
		return table->pcp_off ? BD_PCP_OFF : BD_RIGHT;
	case BD_PCP_ENABLE:
		return table->pcp_off ? BD_RIGHT : BD_PCP_ON;
	}
	if (op->slot >= BD_SLOTS)
		return BD_BAD_SLOT;
	info = table->info[op->slot];
	switch (op->kind) {
	case BD_CONTIG_ALLOC:
		if (bd_bad_gfp(gfp, sleeps) || (gfp & (__GFP_COMP | __GFP_MEMALLOC)))
			return BD_BAD_GFP;
		fallthrough;
	case BD_ISOLATE:
		if (bd_bad_range(op))
			return BD_BAD_RANGE;
		return info ? BD_SLOT_FULL : BD_RIGHT;
	default:
		if (!info)
			return BD_SLOT_EMPTY;
		if (!(info & BD_INFO_RANGE) || (info & BD_INFO_ORDER) != range)
			return BD_OTHER_SLOT;
		return BD_RIGHT;
	}
}

/* Whether an operation can be done where the slots are as table says. */
static enum bd_wrong bd_check(const struct bd_table *table, const struct bd_op *op,
			      bool sleeps)
{
	u8 info;

	if (op->kind < BD_ALLOC || op->kind > BD_PCP_ENABLE)
		return BD_BAD_KIND;
	if (op->kind > BD_NOLOCK_FREE)
		return bd_check_sleeping(table, op, sleeps);
	if (op->kind == BD_DRAIN)
		return BD_RIGHT;
	if (op->slot >= BD_SLOTS)
		return BD_BAD_SLOT;
	info = table->info[op->slot];

	if (op->kind == BD_ALLOC || op->kind == BD_NOLOCK_ALLOC) {
		if (op->order > BD_MAX_ORDER)
			return BD_BAD_ORDER;
		if (bd_bad_node(op->a))
			return BD_BAD_NODE;
		if (op->kind == BD_ALLOC && bd_bad_gfp((__force gfp_t)op->gfp, sleeps))
			return BD_BAD_GFP;
		return info ? BD_SLOT_FULL : BD_RIGHT;
	}

	if (!info)
		return BD_SLOT_EMPTY;
	if (info & BD_INFO_RANGE)
		return BD_OTHER_SLOT;
	if (op->kind == BD_FREE_PIECE) {
		if (!(info & BD_INFO_SPLIT))
			return BD_NOT_SPLIT;
		if (op->a >= 1ULL << (info & BD_INFO_ORDER) ||
		    test_bit(op->a, table->splits[table->split_of[op->slot]].freed))
			return BD_BAD_PIECE;
		return BD_RIGHT;
	}
	if (info & BD_INFO_SPLIT)
		return BD_SLOT_SPLIT;
	if (op->kind == BD_SPLIT) {
		if (info & BD_INFO_COMPOUND)
			return BD_COMPOUND;
		if (table->unused >= BD_SPLITS)
			return BD_TOO_MANY;
	}
	return BD_RIGHT;
}

/* Makes table what it is after an operation that bd_check() found right. */
static void bd_note(struct bd_table *table, const struct bd_op *op)
{
	struct bd_split *split;
	u16 number;

	switch (op->kind) {
	case BD_ALLOC:
	case BD_NOLOCK_ALLOC:
		table->info[op->slot] = BD_INFO_FULL | op->order;
		if (op->kind == BD_NOLOCK_ALLOC || (op->gfp & (__force u32)__GFP_COMP))
			table->info[op->slot] |= BD_INFO_COMPOUND;
		break;
	case BD_FREE:
	case BD_NOLOCK_FREE:
	case BD_CONTIG_FREE:
	case BD_UNISOLATE:
		table->info[op->slot] = 0;
		break;
	case BD_CONTIG_ALLOC:
		table->info[op->slot] = BD_INFO_FULL | BD_INFO_RANGE | BD_RANGE_CONTIG;
		break;
	case BD_ISOLATE:
		table->info[op->slot] = BD_INFO_FULL | BD_INFO_RANGE | BD_RANGE_ISOLATE;
		break;
	case BD_PCP_DISABLE:
	case BD_PCP_ENABLE:
		table->pcp_off = op->kind == BD_PCP_DISABLE;
		break;
	case BD_SPLIT:
		number = table->unused;
		split = &table->splits[number];
		table->unused = split->next;
		table->split_of[op->slot] = number;
		split->left = 1 << (table->info[op->slot] & BD_INFO_ORDER);
		bitmap_zero(split->freed, 1 << BD_MAX_ORDER);
		table->info[op->slot] |= BD_INFO_SPLIT;
		break;
	case BD_FREE_PIECE:
		number = table->split_of[op->slot];
		split = &table->splits[number];
		__set_bit(op->a, split->freed);
		if (--split->left == 0) {
			split->next = table->unused;
			table->unused = number;
			table->info[op->slot] = 0;
		}
		break;
	}
}

static s64 bd_alloc(const struct bd_op *op)
{
	gfp_t gfp = (__force gfp_t)op->gfp;
	int nid = (int)op->a;
	struct page *page;

	if (op->kind == BD_NOLOCK_ALLOC)
		page = bd_alloc_nolock(nid, op->order);
	else if (nid == NUMA_NO_NODE)
		page = alloc_pages(gfp, op->order);
	else
		page = alloc_pages_node(nid, gfp, op->order);
	if (!page)
		return BD_FAILED;
	bd_slots[op->slot] = page;
	return page_to_pfn(page);
}

static s64 bd_take_range(const struct bd_op *op)
{
	unsigned long end = op->a + op->b;
	int error;

	if (op->kind == BD_CONTIG_ALLOC)
		error = bd_alloc_contig(op->a, end, (__force gfp_t)op->gfp);
	else
		error = bd_isolate(op->a, end);
	if (error)
		return BD_FAILED;
	bd_slots[op->slot] = pfn_to_page(op->a);
	bd_pages[op->slot] = op->b;
	return op->a;
}

static void bd_give_range(unsigned int slot, unsigned int range)
{
	unsigned long pfn = page_to_pfn(bd_slots[slot]);

	if (range == BD_RANGE_CONTIG)
		bd_free_contig(pfn, bd_pages[slot]);
	else
		bd_unisolate(pfn, pfn + bd_pages[slot]);
}

static bool bd_have(u32 kind)
{
	switch (kind) {
	case BD_NOLOCK_ALLOC:
	case BD_NOLOCK_FREE:
		return BD_HAVE_NOLOCK;
	case BD_CONTIG_ALLOC:
	case BD_CONTIG_FREE:
		return BD_HAVE_CONTIG;
	case BD_ISOLATE:
	case BD_UNISOLATE:
		return BD_HAVE_ISOLATION;
	default:
		return true;
	}
}

static s64 bd_do(const struct bd_op *op, bool sleeps)
{
	struct page *page;
	unsigned int order;
	s64 value = 0;

	if (bd_check(&bd_table, op, sleeps) != BD_RIGHT)
		return BD_SKIPPED;
	if (!bd_have(op->kind))
		return BD_NO_SUCH;
	page = bd_slots[op->slot % BD_SLOTS];
	order = bd_table.info[op->slot % BD_SLOTS] & BD_INFO_ORDER;

	switch (op->kind) {
	case BD_ALLOC:
	case BD_NOLOCK_ALLOC:
		value = bd_alloc(op);
		if (value < 0)
			return value;
		break;
	case BD_FREE:
		__free_pages(page, order);
		break;
	case BD_NOLOCK_FREE:
		bd_free_nolock(page, order);
		break;
	case BD_SPLIT:
		split_page(page, order);
		break;
	case BD_FREE_PIECE:
		__free_pages(page + op->a, 0);
		break;
	case BD_DRAIN:
		/* In a batch that may sleep this CPU could be another one. */
		preempt_disable();
		drain_local_pages(NULL);
		preempt_enable();
		break;
	case BD_CONTIG_ALLOC:
	case BD_ISOLATE:
		value = bd_take_range(op);
		if (value < 0)
			return value;
		break;
	case BD_CONTIG_FREE:
	case BD_UNISOLATE:
		/* What the order is to other slots. */
		bd_give_range(op->slot, order);
		break;
	case BD_DRAIN_ALL:
		drain_all_pages(NULL);
		break;
	case BD_PCP_DISABLE:
		/*
		 * Leaves a mutex locked, which nobody else takes unless the sizes
		 * of per-CPU lists are changed.
		 */
		bd_pcp_zone = bd_zone(op);
		zone_pcp_disable(bd_pcp_zone);
		break;
	case BD_PCP_ENABLE:
		zone_pcp_enable(bd_pcp_zone);
		break;
	}
	bd_note(&bd_table, op);
	return value;
}

/* Whether the whole batch can be run; if not, says so in it. */
static bool bd_right(struct bd_batch *batch, bool sleeps)
{
	enum bd_wrong wrong;
	u32 i;

	if (batch->count > BD_OPS) {
		batch->error = BD_BAD_COUNT;
		return false;
	}
	bd_ahead = bd_table;
	for (i = 0; i < batch->count; i++) {
		wrong = bd_check(&bd_ahead, &batch->ops[i], sleeps);
		if (wrong != BD_RIGHT) {
			batch->error = i;
			batch->results[i].value = wrong;
			batch->results[i].tsc = 0;
			return false;
		}
		bd_note(&bd_ahead, &batch->ops[i]);
	}
	return true;
}

/* Whether there is a batch to run. */
static bool bd_take(struct bd_batch *batch, bool sleeps)
{
	if (batch->state != BD_READY)
		return false;
	if (bd_right(batch, sleeps))
		return true;
	batch->state = BD_REFUSED;
	return false;
}

static void bd_batch(struct bd_batch *batch, bool sleeps)
{
	u32 i, count = batch->count;

	for (i = 0; i < count; i++) {
		batch->results[i].value = bd_do(&batch->ops[i], sleeps);
		batch->results[i].tsc = get_cycles();
	}
	batch->error = 0;
	batch->state = BD_DONE;
}

#ifdef CONFIG_SMP
static atomic_t bd_held = ATOMIC_INIT(0);
static int bd_hold_them;

static void bd_held_cpu(void *unused)
{
	atomic_inc(&bd_held);
	while (READ_ONCE(bd_hold_them))
		cpu_relax();
	atomic_dec(&bd_held);
}

/* The interrupt that holds a CPU may have come while it had a lock. */
static bool bd_locks_free(void)
{
	struct zone *zone;
	int cpu;

	for_each_populated_zone(zone) {
		if (spin_is_locked(&zone->lock))
			return false;
		for_each_possible_cpu(cpu) {
			if (spin_is_locked(&per_cpu_ptr(zone->per_cpu_pageset, cpu)->lock))
				return false;
		}
	}
	return true;
}

static void bd_let_go(void)
{
	WRITE_ONCE(bd_hold_them, 0);
	while (atomic_read(&bd_held))
		cpu_relax();
}

/* Holds all other CPUs, none with a lock of the allocator. Interrupts are off. */
static bool bd_hold_once(unsigned long *flags)
{
	int us;

	WRITE_ONCE(bd_hold_them, 1);
	smp_call_function(bd_held_cpu, NULL, 0);
	/*
	 * From here on no interrupt of this CPU may wait for a lock that a held
	 * one has.
	 */
	local_irq_save(*flags);
	for (us = 0; us < BD_HOLD_US; us++) {
		if (atomic_read(&bd_held) == num_online_cpus() - 1)
			break;
		udelay(1);
	}
	if (us < BD_HOLD_US && bd_locks_free())
		return true;
	bd_let_go();
	local_irq_restore(*flags);
	return false;
}

static bool bd_hold(unsigned long *flags)
{
	int tries;

	for (tries = 0; tries < BD_HOLD_TRIES; tries++) {
		if (bd_hold_once(flags))
			return true;
		udelay(100);
	}
	return false;
}
#else
static void bd_let_go(void)
{
}

static bool bd_hold(unsigned long *flags)
{
	local_irq_save(*flags);
	return true;
}
#endif

static bool bd_stop(unsigned long *flags)
{
	preempt_disable();
	if (bd_hold(flags))
		return true;
	preempt_enable();
	return false;
}

static void bd_go_on(unsigned long flags)
{
	bd_let_go();
	local_irq_restore(flags);
	preempt_enable();
}

static int bd_run(void)
{
	unsigned long flags;

	if (!bd_stop(&flags))
		return -EBUSY;
	bd_ring();
	do {
		if (bd_take(&buddydiff_batch, false))
			bd_batch(&buddydiff_batch, false);
		bd_ring();
	} while (buddydiff_batch.state == BD_READY);
	bd_go_on(flags);
	return 0;
}

static int bd_run_sleeping(void)
{
	unsigned long flags;
	bool right;

	if (!bd_stop(&flags))
		return -EBUSY;
	bd_ring();
	right = bd_take(&buddydiff_batch, true);
	bd_go_on(flags);
	if (right)
		bd_batch(&buddydiff_batch, true);
	/* Results are there, and are not kept back where CPUs cannot be held. */
	while (!bd_stop(&flags))
		cond_resched();
	bd_ring();
	bd_go_on(flags);
	return 0;
}

static void bd_free_all(void)
{
	unsigned int slot, piece, order;
	const struct bd_split *split;
	u8 info;

	if (bd_table.pcp_off)
		zone_pcp_enable(bd_pcp_zone);
	for (slot = 0; slot < BD_SLOTS; slot++) {
		info = bd_table.info[slot];
		order = info & BD_INFO_ORDER;
		if (info & BD_INFO_RANGE) {
			bd_give_range(slot, order);
		} else if (info & BD_INFO_SPLIT) {
			split = &bd_table.splits[bd_table.split_of[slot]];
			for_each_clear_bit(piece, split->freed, 1 << order)
				__free_pages(bd_slots[slot] + piece, 0);
		} else if (info) {
			__free_pages(bd_slots[slot], order);
		}
		cond_resched();
	}
	bd_clear(&bd_table);
}

static ssize_t bd_write(struct file *file, const char __user *buf, size_t len,
			loff_t *pos)
{
	int error = 0;
	char byte;

	if (len != 1)
		return -EINVAL;
	if (get_user(byte, buf))
		return -EFAULT;
	if (!mutex_trylock(&bd_mutex))
		return -EBUSY;
	switch (byte) {
	case 'r':
		error = bd_run();
		break;
	case 's':
		error = bd_run_sleeping();
		break;
	case 'q':
		bd_free_all();
		break;
	default:
		error = -EINVAL;
	}
	mutex_unlock(&bd_mutex);
	return error ? error : 1;
}

static const struct proc_ops bd_ops = {
	.proc_write = bd_write,
};

static int __init bd_init(void)
{
	BUILD_BUG_ON(sizeof(struct bd_op) != 32);
	BUILD_BUG_ON(sizeof(struct bd_result) != 16);
	BUILD_BUG_ON(offsetof(struct bd_batch, ops) != 24);
	BUILD_BUG_ON(offsetof(struct bd_batch, results) != 24 + 32 * BD_OPS);
	BUILD_BUG_ON(sizeof(struct bd_batch) != 24 + 48 * BD_OPS);
	/* The module gfp of host/src/batch.rs has these. */
	BUILD_BUG_ON(___GFP_DMA != 0x1 || ___GFP_HIGHMEM != 0x2 || ___GFP_DMA32 != 0x4);
	BUILD_BUG_ON(___GFP_MOVABLE != 0x8 || ___GFP_RECLAIMABLE != 0x10);
	BUILD_BUG_ON(___GFP_HIGH != 0x20 || ___GFP_ZERO != 0x100);
	BUILD_BUG_ON(___GFP_DIRECT_RECLAIM != 0x400 || ___GFP_KSWAPD_RECLAIM != 0x800);
	BUILD_BUG_ON(___GFP_NOWARN != 0x2000 || ___GFP_RETRY_MAYFAIL != 0x4000);
	BUILD_BUG_ON(___GFP_NORETRY != 0x10000);
	BUILD_BUG_ON(___GFP_MEMALLOC != 0x20000 || ___GFP_COMP != 0x40000);
	BUILD_BUG_ON(___GFP_NOMEMALLOC != 0x80000 || ___GFP_THISNODE != 0x200000);

	bd_clear(&bd_table);
	buddydiff_batch.magic = BD_MAGIC;
	buddydiff_batch.abi = BD_ABI;
	return proc_create("buddydiff", 0200, NULL, &bd_ops) ? 0 : -ENOMEM;
}
late_initcall(bd_init);
