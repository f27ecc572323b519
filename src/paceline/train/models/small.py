"""A small convolutional network for 28x28 grey images: trains on one processor core within seconds."""

from torch import nn

INPUT = (1, 28, 28)
LEARNING_RATE = 0.02
MOMENTUM = 0.9
BATCH_SIZE = 64
EPOCHS = 5


def build(num_classes: int) -> nn.Module:
    """Make the network: (n, 1, 28, 28) images to (n, num_classes) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        # large enough that compressing its gradient is worthwhile
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
