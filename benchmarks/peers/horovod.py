"""Horovod's DistributedOptimizer over gloo; needs the package horovod (0.28.1), which nothing here installs."""

import os
import socket

import horovod.torch as hvd
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

_server = []


def meet(rank, size):
    """What horovodrun would have started and said: a meeting point on rank 0, and who everyone is."""
    hosts = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    port = [0]
    if rank == 0:
        _server.append(RendezvousServer(0))
        port[0] = _server[0].start()
        _server[0].init(get_host_assignments(parse_hosts(",".join(f"{host}:1" for host in hosts)), size))
    dist.broadcast_object_list(port)
    said = {"RANK": rank, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": size}
    said |= {"HOSTNAME": hosts[rank], "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "e0"}
    said |= {"GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"], "GLOO_RENDEZVOUS_PORT": port[0]}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in said.items()})


def start(work):
    meet(work.rank, work.size)
    hvd.init()
    model = work.model()
    optimizer = hvd.DistributedOptimizer(work.sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return work.by_hand(model, optimizer)
