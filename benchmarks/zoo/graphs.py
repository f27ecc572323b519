"""Graph networks by hand: dense, by lists of edges, and by batches that a collate_fn merges to one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

from zoo.case import COUNT, ROWS, Parts, dice, family, labels, lengths, numbers

case = family("graphs")
NODES = 7


def dense() -> tuple[Tensor, Tensor]:
    """(features, symmetric adjacency with itself) of each sample."""
    links = torch.rand(COUNT, NODES, NODES, generator=dice(9)) < 0.3
    near = (links | links.mT | torch.eye(NODES, dtype=torch.bool)).to(torch.get_default_dtype())
    return numbers(NODES, 5), near


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        scale = near.sum(-1).rsqrt()
        near = scale[..., None] * near * scale[:, None]
        return self.head(F.relu(near @ self.second(F.relu(near @ self.first(x)))).mean(1))


@case(Adam, lr=0.01, weight_decay=5e-4)
def graph_convolutions() -> Parts:
    return GCN(), TensorDataset(*dense(), labels(3)), F.cross_entropy


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.ModuleList([nn.Linear(5, 16, bias=False), nn.Linear(16, 16, bias=False)])
        self.ask = nn.ParameterList(torch.randn(16, 2, generator=dice(i)) / 4 for i in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        for turn, ask in zip(self.turn, self.ask, strict=True):
            h = turn(x)
            mine, theirs = (h @ ask).unbind(-1)
            score = F.leaky_relu(mine[:, :, None] + theirs[:, None], 0.2).masked_fill(near == 0, -1e9)
            x = F.elu(score.softmax(-1) @ h)
        return self.head(x.amax(1))


@case(AdamW, lr=0.01)
def graph_attention() -> Parts:
    return GAT(), TensorDataset(*dense(), labels(3)), F.cross_entropy


class GIN(nn.Module):
    """Batch norm over the nodes of all graphs, which are as many in each."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)) for wide in (5, 16)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        for eps, net in zip(self.eps, self.mlps, strict=True):
            x = net(((1 + eps) * x + near @ x).flatten(0, 1)).view(len(x), NODES, -1)
        return self.head(x.sum(1))


@case(Adam, lr=0.005, join={"batch_norm": "sync"})
def graph_isomorphism() -> Parts:
    return GIN(), TensorDataset(*dense(), labels(3)), F.cross_entropy


class Merged:
    """Graphs of unlike sizes: (features of nodes, edges, label)."""

    def __init__(self) -> None:
        self.sizes, seeds = lengths(3, 9), dice(11)
        self.graphs = []
        for size, label in zip(self.sizes.tolist(), labels(3), strict=True):
            edges = torch.randint(0, size, (2, 2 * size), generator=seeds)
            self.graphs.append((torch.randn(size, 5, generator=seeds), edges, label))

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, i: int) -> Any:
        return self.graphs[i]


def merge(graphs: list[Any]) -> dict[str, Tensor]:
    """One large graph, as graph libraries make it: the first dimension of its tensors is no sample."""
    start, edges = 0, []
    for x, each, _ in graphs:
        edges.append(each + start)
        start += len(x)
    return {
        "x": torch.cat([x for x, _, _ in graphs]),
        "edges": torch.cat(edges, 1),
        "graph": torch.cat([torch.full((len(x),), i) for i, (x, _, _) in enumerate(graphs)]),
        "label": torch.stack([label for *_, label in graphs]),
    }


class Messages(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.edge, self.node, self.head = nn.Linear(10, 16), nn.Linear(21, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, label: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.edge(torch.cat([x[source], x[target]], 1)))
        heard = x.new_zeros(len(x), 16).index_add(0, target, sent)
        h = F.relu(self.norm(self.node(torch.cat([x, heard], 1))))
        return self.head(h.new_zeros(len(label), 16).index_add(0, graph, h))


def by_graph(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["label"], reduction="sum"), len(batch["label"])


@case(SGD, lr=0.05, momentum=0.9)
def messages_merged() -> Parts:
    return Messages(), DataLoader(Merged(), ROWS, collate_fn=merge), by_graph


def by_mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["label"])


@case(Adam, lr=0.01)
def messages_merged_mean() -> Parts:
    """With the usual loss, a mean over graphs, of which each process has as many as it was given samples."""
    return Messages(), DataLoader(Merged(), ROWS, collate_fn=merge), by_mean


@case(SGD, lr=0.05, momentum=0.9, join={"batch_norm": "sync"})
def messages_merged_norm() -> Parts:
    return Messages(True), DataLoader(Merged(), ROWS, collate_fn=merge), by_graph


def by_nodes(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["graph"] % 3)


class Nodes(Messages):
    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, label: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.edge(torch.cat([x[source], x[target]], 1)))
        heard = x.new_zeros(len(x), 16).index_add(0, target, sent)
        return self.head(F.relu(self.node(torch.cat([x, heard], 1))))


def merge_nodes(graphs: list[Any]) -> dict[str, Tensor]:
    merged = merge(graphs)
    kinds = torch.cat([(x[:, 0] > 0).long() for x, *_ in graphs])
    return {**merged, "graph": kinds}


@case(Adam, lr=0.01, differs="not a mean over|rows in its first tensor|other than samples")
def nodes_merged_mean() -> Parts:
    """A class for each node: a mean over nodes, of which each process has another number."""
    return Nodes(), DataLoader(Merged(), ROWS, collate_fn=merge_nodes), by_nodes
