"""A Ray cluster of simulated nodes on this machine, for `test_ray.py`. Prints the address of its head; then each line
of stdin changes it: `add CPUS`, or `kill`, which kills the first node that is not the head, or `kill ID`. Ends with
stdin."""

import signal
import sys

from ray.cluster_utils import Cluster

STORE = 80 << 20

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), "object_store_memory": STORE})
    nodes = [cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE) for cpus in sys.argv[2:]]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add", cpus]:
                nodes.append(cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE))
            case ["kill"]:
                nodes.pop(0).kill_raylet(check_alive=False)
            case ["kill", node]:
                (gone,) = (one for one in nodes if one.node_id == node)
                nodes.remove(gone)
                gone.kill_raylet(check_alive=False)
        print("done", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its own processes get it
    cluster.shutdown()
