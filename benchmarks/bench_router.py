"""The router of `infer.distributed` by simulation: many replicas, several fronts with a router each, no model.

Printed of `router_trace.simulate`: the share of the ideal's hits, the most loaded replica over the mean, seconds to
choose one, and what a router's memory takes.
"""

import sys
import time
import tracemalloc
from collections.abc import Mapping

from command_line import REPORTS, make_parser
from infer.distributed.router import RoutedPrompt, Router
from machine import write_report
from router_trace import by_routers, replica_names, simulate

LOAD = 0.7
# Replicas, fronts, whether conversations are sticky. The last is for the seconds of a choice alone.
ASKED = [(8, 1, True), (8, 2, True), (8, 2, False), (40, 1, True), (40, 10, True), (40, 10, False), (800, 1, True)]


def measure(num_replicas: int, num_fronts: int, num_requests: int, *, is_sticky: bool) -> dict[str, float]:
    choose, chosen_in = by_routers(num_fronts, is_sticky=is_sticky), list[float]()

    def timed(prompt: RoutedPrompt, queued: Mapping[str, float], conversation: str) -> str:
        began = time.perf_counter()
        name = choose(prompt, queued, conversation)
        chosen_in.append(time.perf_counter() - began)
        return name

    found = simulate(timed, num_replicas=num_replicas, load=LOAD, num_requests=num_requests)
    return {
        "replicas": num_replicas,
        "fronts": num_fronts,
        "sticky": is_sticky,
        "share_of_ideal_hits": round(found.share_of_ideal, 3),
        "most_loaded_over_mean": round(max(map(found.load_over_mean, replica_names(num_replicas))), 3),
        "choose_ms": round(1000 * sum(chosen_in) / num_requests, 3),
    }


def bytes_per_page() -> float:
    """Of a router that knows many."""
    tracemalloc.start()
    router, count = Router(10**6), 20_000
    for number in range(count // 100):
        router.sent(RoutedPrompt(6400, [b"%8d%8d" % (number, index) for index in range(100)]), "r0")
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / count


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests-each", type=int, default=150, help="of a replica")
    arguments = parser.parse_args()
    found = []
    for num_replicas, num_fronts, is_sticky in ASKED:
        requests = 400 if num_replicas > 100 else arguments.requests_each * num_replicas
        found.append(measure(num_replicas, num_fronts, requests, is_sticky=is_sticky))
        print(found[-1], flush=True)
    results = {"simulated": found, "bytes_per_page": round(bytes_per_page())}
    print(f"{results['bytes_per_page']} bytes for a page that a router knows")
    write_report(REPORTS, "router", vars(arguments), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
