/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What differs between the kernels that buddydiff.c is built into.
 */
#ifndef _BUDDYDIFF_COMPAT_H
#define _BUDDYDIFF_COMPAT_H

#include <linux/gfp.h>
#include <linux/version.h>

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

#endif
