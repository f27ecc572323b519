"""No exchange: plain PyTorch on every node, each alone. The limit of what several nodes can reach by plain steps."""


def start(work):
    return work.by_hand(work.model())
