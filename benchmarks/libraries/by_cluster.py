"""A model trained by two workers of Ray, or of Spark on its driver or its executors; writes its weights and its class.

    python [-m paceline.ddp] benchmarks/libraries/by_cluster.py ray|spark|spark-executors OUT.pt
    python benchmarks/libraries/by_cluster.py compare OUT.pt OUT.pt

Ray, or pyspark with Java, is installed besides.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def train(out: str, wrap: Any = None) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 5)
    model = (wrap or DistributedDataParallel)(torch.nn.Sequential(*layers).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dice = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 300, generator=dice, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"class": type(model).__module__, "weights": model.module.state_dict()}, out)


def by_ray(out: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    ray.init(num_cpus=2, include_dashboard=False)
    results = RunConfig(storage_path=str(Path(out).parent / "results"))
    options = {"scaling_config": ScalingConfig(num_workers=2), "run_config": results}
    TorchTrainer(lambda _: train(out, prepare_model), train_loop_config={}, **options).fit()


def by_spark(out: str, local: bool) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(train, out)
    spark.stop()


def main(how: str, *paths: str) -> None:
    out, *others = (str(Path(path).absolute()) for path in paths)
    if how == "ray":
        by_ray(out)
    elif how == "compare":
        import torch
        from others import apart

        one, other = (torch.load(path, weights_only=True) for path in (out, *others))
        print(one["class"], other["class"], f"{apart(one['weights'], other['weights']):.1e}")
    else:
        by_spark(out, how == "spark")


if __name__ == "__main__":
    main(*sys.argv[1:])
