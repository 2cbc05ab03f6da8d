"""Slides: pages per second of the renderer, both passes and both screenshots, beside the processor time they take.

`python benchmarks/slides.py [--pages 200] [--tabs 3]`. Every page is different, so nothing comes from the cache. The
last line divides by the processor time of browser, driver and measuring: what two cores could do with nothing beside.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm5.tasks.slides.brief import assets_of, draw_brief
from glm5.tasks.slides.compact import compile_page
from glm5.tasks.slides.oracle import oracle_page
from glm5.tasks.slides.render import Renderer

CORES = 2


def spent() -> float:
    """Processor seconds so far of this process and all below it, living and reaped."""
    parents, used = dict[int, int](), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    mine = [os.getpid()]
    for pid in mine:  # grows while it is walked
        mine += [child for child, parent in parents.items() if parent == pid]
    return sum(used[pid] for pid in mine if pid in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--tabs", type=int, default=3)
    options = parser.parse_args()
    pages = []
    for i in range(options.pages + 2 * options.tabs):
        rng = random.Random(i)
        brief = draw_brief(rng)
        pages.append((compile_page(oracle_page(brief, rng, 0.5)[0], brief), assets_of(brief)))
    warm, pages = pages[: 2 * options.tabs], pages[2 * options.tabs :]
    with Renderer(tabs=options.tabs) as renderer, ThreadPoolExecutor(options.tabs) as pool:
        list(pool.map(lambda page: renderer.measure(*page), warm))
        began, used = time.perf_counter(), spent()
        list(pool.map(lambda page: renderer.measure(*page), pages))
        wall, work = time.perf_counter() - began, spent() - used
    print(f"{len(pages)} pages, {options.tabs} tabs, load of the machine {os.getloadavg()[0]:.1f}")
    print(f"wall clock       {len(pages) / wall:6.1f} pages/s")
    print(f"processor time   {1000 * work / len(pages):6.0f} ms a page")
    print(f"{CORES} cores, alone   {CORES * len(pages) / work:6.1f} pages/s")


if __name__ == "__main__":
    main()
