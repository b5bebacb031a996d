"""How fast do pages of a KV-cache move between the GPU and compressed slots in host memory?

    python -m benchmarks.kv_pages [--decoding] [--out DIR] [--device cpu] [--quick]

--decoding measures pages that move during steps of a language model instead. kv_decoding.py does this and needs
transformers.

256 MiB of a paged cache, BF16 N(0, 0.02), form 4,096 pages of 64 KiB. They go to random pages of an `ibp.kv.KVStore` in
pinned host memory and come back to random blocks. The arms `store` and `load` use the default number of
multiprocessors, at most 8, or all; and level "fast". For comparison there are raw pages: `copied`, all of them by one
call of the copy engine, as if they were in order; `copied page by page`; and `by kernel`, in one launch like ibp's.
Each arm is measured alone, and most of them during a train of matrix products (see overlap.py). `small` moves 64 pages
in one call. In every arm the pages are checked.
"""

import argparse
import sys

import torch

import ibp

from . import harness, ideal, inputs, overlap

COLUMNS = ("pages", "gain", "matmul_share", "share_of_alone", *harness.TARGET_COLUMNS)
PAGE_BYTES, ROW_BYTES = 1 << 16, 2048
TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, inputs.MIB
FEW_PAGES = 64
STORE, LOAD = "store", "load"
# Targets in GB/s of original bytes, but at least the rate of a raw copy in the same direction.
WANTED_GBPS = {STORE: 65.0, LOAD: 75.0}
BESIDE_SHARE = 0.8  # Beside products the target is this share of the rate alone.
RAW_SMS, FEW_SMS = 16, 8
COPIED, BY_PAGE, BY_KERNEL = "copied", "copied page by page", "by kernel"


class Pages:
    """A paged cache, the tensor that its blocks come back to, and the run that records measurements."""

    def __init__(self, run):
        self.run = run
        num_bytes = QUICK_TABLE_BYTES if run.quick else TABLE_BYTES
        self.kv = inputs.normal_rows(num_bytes, torch.bfloat16, 0.02, run.device, columns=PAGE_BYTES // 2)
        self.num_bytes, self.out = num_bytes, torch.empty_like(self.kv)
        self.pages, self.blocks = (torch.randperm(len(self.kv), device=run.device) for _ in range(2))
        self.from_kv, self.to_out = ibp.kv.PagedTensors(self.kv), ibp.kv.PagedTensors(self.out)
        self.products = overlap.Products(run) if run.on_gpu else None
        self.raw_gbps = {}

    def measure(self, work, wanted=None, beside=True):
        """Measures one arm, alone and during products. Returns its GB/s alone."""
        run = self.run
        with run.cell(f"{work.direction}, {work.arm}"):
            work.call()
            work.check("alone")
            seconds = run.seconds([work.call])
            gbps = work.num_bytes * 1e-9 / seconds
            self.record(work, f"{work.arm}, alone", gbps, wanted)
            if run.on_gpu and beside and not run.quick:  # A short train of products would end before two fetches do.
                alone_s, product_s, beside_s = overlap.measure_beside(run, self.products, work, seconds)
                rate = work.num_bytes * 1e-9 / beside_s
                shares = {
                    "matmul_share": f"{alone_s / product_s:.4f}",
                    "share_of_alone": f"{seconds / beside_s:.4f}",
                }
                self.record(work, f"{work.arm}, beside", rate, BESIDE_SHARE * gbps if wanted else None, **shares)
            return gbps

    def record(self, work, arm, gbps, wanted, **extra):
        link = ideal.MACHINE.copy_out_gbps if work.direction == STORE else ideal.LINK_COPY_GBPS
        self.run.add(
            case=work.direction,
            arm=arm,
            pages=work.num_bytes // PAGE_BYTES,
            rows=work.num_bytes // ROW_BYTES,
            row_bytes=ROW_BYTES,
            dtype=torch.bfloat16,
            savings=work.savings,
            gbps=gbps,
            ideal_gbps=link / (1 - work.savings),
            sms=work.sms,
            gain=f"{work.gain:.3f}",
            **extra,
            **harness.judged(gbps, wanted),
        )


class Work:
    """A way to move pages in one direction. call() moves them. check() checks that they have arrived, and then
    overwrites the target."""

    def __init__(self, direction, arm, call, check, num_bytes, sms, savings=0.0, gain=1.0):
        self.direction, self.arm, self.call, self._check = direction, arm, call, check
        self.num_bytes, self.sms, self.savings, self.gain = num_bytes, sms, savings, gain

    def check(self, what):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._check(f"{self.direction}, {self.arm}, {what}")


def raw_works(of):
    """Yields the ways of raw pages: by the copy engine, in one piece and page by page, and by a kernel."""
    host = torch.empty(of.kv.shape, dtype=of.kv.dtype, pin_memory=of.run.on_gpu)
    back = of.kv.to("cpu")
    order = torch.argsort(of.pages)

    def stored_as(wanted):
        def check(what):
            harness.check_bits(host, wanted, what)
            harness.poison(host)

        return check

    def loaded_as(wanted):
        def check(what):
            harness.check_bits(of.out, wanted, what)
            harness.poison(of.out)

        return check

    def by_page(to, source, targets, sources):
        for target, block in zip(targets, sources):
            to[target].copy_(source[block], non_blocking=True)

    pages, blocks = of.pages.tolist(), of.blocks.tolist()
    same = of.num_bytes, 0
    in_pages = back[of.blocks.cpu()[order.cpu()]]  # Page p has block blocks[order[p]].
    yield Work(STORE, COPIED, lambda: host.copy_(of.kv, non_blocking=True), stored_as(back), *same)
    yield Work(STORE, BY_PAGE, lambda: by_page(host, of.kv, pages, blocks), stored_as(in_pages), *same)
    if of.run.on_gpu:
        mapped = ibp._machine.memory.device_view(host, of.out.device).view(torch.int64)
        words = of.kv.view(torch.int64)

        def write():
            mapped[of.pages] = words[of.blocks]

        yield Work(STORE, BY_KERNEL, write, stored_as(in_pages), of.num_bytes, None)
    source = torch.empty(of.kv.shape, dtype=of.kv.dtype, pin_memory=of.run.on_gpu).copy_(in_pages)
    yield Work(
        LOAD, COPIED, lambda: of.out.copy_(source, non_blocking=True), loaded_as(source.to(of.out.device)), *same
    )
    yield Work(LOAD, BY_PAGE, lambda: by_page(of.out, source, blocks, pages), loaded_as(of.kv), *same)
    table = ibp.compress(source, scheme="raw", row_bytes=ROW_BYTES, device=of.run.device)
    order_of_pages = of.pages[torch.argsort(of.blocks)]
    yield Work(
        LOAD,
        BY_KERNEL,
        lambda: ibp.index_select(table, order_of_pages, out=of.out, max_sms=RAW_SMS),
        loaded_as(of.kv),
        of.num_bytes,
        RAW_SMS,
    )


def make_store(of, level):
    return ibp.kv.KVStore(
        of.kv, num_pages=len(of.kv), page_bytes=PAGE_BYTES, level=level, device=of.run.device, memory="pinned"
    )


def stream_of(run):
    return torch.cuda.current_stream() if run.on_gpu else None


def ibp_works(of, level, store, sms, count=None):
    """Yields the ways of a store's pages. count: how many pages move; None: all."""
    run, num_bytes = of.run, of.num_bytes if count is None else count * PAGE_BYTES
    pages, blocks = of.pages[:count], of.blocks[:count]
    arm = ("ibp" if level == "default" else f"ibp, {level}") + ("" if count is None else ", small")
    savings = 1 - store.place.slot_bytes / ROW_BYTES
    kept = savings, store.gain
    taken = {STORE: 24, LOAD: 16} if sms is None else dict.fromkeys((STORE, LOAD), sms or None)
    limit = run.num_sms if sms == 0 else sms

    def save():
        store.store(pages, of.from_kv, blocks, stream=stream_of(run), max_sms=limit)

    def fetch():
        store.load(pages, of.to_out, blocks, stream=stream_of(run), max_sms=limit)

    def check(what):
        harness.check_bits(of.out[blocks], of.kv[blocks], what)
        harness.poison(of.out)
        store.check()

    def check_stored(what):
        fetch()
        run.sync()
        check(what)
        harness.poison(store.place.slots)

    yield Work(STORE, arm, save, check_stored, num_bytes, taken[STORE], *kept)
    save()
    run.sync()
    yield Work(LOAD, arm, fetch, check, num_bytes, taken[LOAD], *kept)


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--decoding", action="store_true")
    found, others = own.parse_known_args(argv)
    if found.decoding:
        from . import kv_decoding  # This imports transformers, which takes seconds.

        return kv_decoding.main(others)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("kv_pages", args, COLUMNS)
    torch.manual_seed(0)
    of = Pages(run)
    for work in raw_works(of):
        gbps = of.measure(work, beside=work.arm != BY_PAGE)
        if gbps and work.arm in (COPIED, BY_KERNEL):
            of.raw_gbps[work.direction] = max(gbps, of.raw_gbps.get(work.direction, 0.0))
    for level in ("default", "fast"):
        store = make_store(of, level)
        for sms in (None, FEW_SMS, 0) if level == "default" and run.on_gpu else (None,):
            for work in ibp_works(of, level, store, sms):
                wanted = max(WANTED_GBPS[work.direction], of.raw_gbps.get(work.direction, 0.0))
                judged = sms is None and level == "default"
                of.measure(work, wanted if judged else None, beside=sms != 0)
    few = min(FEW_PAGES, len(of.kv))
    for work in ibp_works(of, "default", make_store(of, "default"), None, few):
        of.measure(work, beside=False)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
