/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What differs between the kernels that buddydiff.c is built into.
 */
#ifndef _BUDDYDIFF_COMPAT_H
#define _BUDDYDIFF_COMPAT_H

#include <linux/gfp.h>
#include <linux/page-isolation.h>
#include <linux/version.h>

#include "internal.h"
/* 7.3 moved drain_all_pages() and zone_pcp_disable() there. */
#if __has_include("page_alloc.h")
#include "page_alloc.h"
#endif

/*
 * alloc_pages_nolock() took no GFP flags before 6.18, and the kernels before
 * that which have it are not among those that we know.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
#define BD_HAVE_NOLOCK 1

static inline struct page *bd_alloc_nolock(int nid, unsigned int order)
{
	return alloc_pages_nolock(0, nid, order);
}

static inline void bd_free_nolock(struct page *page, unsigned int order)
{
	free_pages_nolock(page, order);
}
#else
#define BD_HAVE_NOLOCK 0

static inline struct page *bd_alloc_nolock(int nid, unsigned int order)
{
	return NULL;
}

static inline void bd_free_nolock(struct page *page, unsigned int order)
{
}
#endif

/* Kernels before 6.18 are told what type the pageblocks get afterwards. */
#ifdef CONFIG_CONTIG_ALLOC
#define BD_HAVE_CONTIG 1

static inline int bd_alloc_contig(unsigned long start, unsigned long end, gfp_t gfp)
{
#ifdef ACR_FLAGS_NONE
	return alloc_contig_range(start, end, ACR_FLAGS_NONE, gfp);
#else
	return alloc_contig_range(start, end, MIGRATE_MOVABLE, gfp);
#endif
}

static inline void bd_free_contig(unsigned long start, unsigned long pages)
{
	free_contig_range(start, pages);
}
#else
#define BD_HAVE_CONTIG 0

static inline int bd_alloc_contig(unsigned long start, unsigned long end, gfp_t gfp)
{
	return -EBUSY;
}

static inline void bd_free_contig(unsigned long start, unsigned long pages)
{
}
#endif

#ifdef CONFIG_MEMORY_ISOLATION
#define BD_HAVE_ISOLATION 1

static inline int bd_isolate(unsigned long start, unsigned long end)
{
#ifdef ACR_FLAGS_NONE
	return start_isolate_page_range(start, end, PB_ISOLATE_MODE_OTHER);
#else
	return start_isolate_page_range(start, end, MIGRATE_MOVABLE, 0, GFP_KERNEL);
#endif
}

static inline void bd_unisolate(unsigned long start, unsigned long end)
{
#ifdef ACR_FLAGS_NONE
	undo_isolate_page_range(start, end);
#else
	undo_isolate_page_range(start, end, MIGRATE_MOVABLE);
#endif
}
#else
#define BD_HAVE_ISOLATION 0

static inline int bd_isolate(unsigned long start, unsigned long end)
{
	return -EBUSY;
}

static inline void bd_unisolate(unsigned long start, unsigned long end)
{
}
#endif

#endif
