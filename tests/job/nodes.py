"""A cluster of several nodes on this machine: each line on stdin adds one, the end of file ends it.

Argument: the port of a dashboard, which takes jobs. Each node has a folder of its own then, in RAY_TMPDIR.
"""

import os
import sys
from contextlib import suppress

import psutil
from ray.cluster_utils import Cluster


def main():
    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    if sys.argv[1:]:
        dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": int(sys.argv[1])}
        dashboard["dashboard_agent_listen_port"] = None  # a free one: another Ray may have the usual one
        head = node | dashboard
        node["temp_dir"] = f"{os.environ['RAY_TMPDIR']}/2"
    cluster = Cluster(initialize_head=True, head_node_args=head)
    say(cluster.address)
    for _ in sys.stdin:
        cluster.add_node(**node)
        say("done")
    for node in cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def kill_machine(node):
    """Kill all that runs on a node, as a power cut does.

    The raylet goes first, since it would tell of its workers' deaths, and is reaped, or they would write on.
    """
    [raylet] = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    raylet.process.kill()
    raylet.process.wait()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
