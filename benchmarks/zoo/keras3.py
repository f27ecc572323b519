"""Keras 3 on torch: its layers are modules, its moving means parameters that are frozen."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.case import Parts, family, labels, numbers, table

case = family("keras")
SYNC = {"batch_norm": "sync"}
keras.backend.set_floatx("float64")


def build(*layers: Any) -> Any:
    return keras.Sequential(list(layers))


def training(model: Any, batch: Any) -> Any:
    return model(*batch[:-1], training=True)


TRAIN = {"forward": training}


@case(Adam, lr=0.01)
def keras_dense() -> Parts:
    layers = keras.layers
    return (
        build(keras.Input((8,)), layers.Dense(32, "gelu"), layers.LayerNormalization(), layers.Dense(3)),
        table(),
        F.cross_entropy,
    )


@case(SGD, lr=0.05, momentum=0.9, join=TRAIN | SYNC)
def keras_batch_norm() -> Parts:
    layers = keras.layers
    model = build(keras.Input((8,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(3))
    return model, table(), F.cross_entropy


@case(SGD, lr=0.05, join=TRAIN, differs="batch norm|running|moving|forward changes|frozen")
def keras_batch_norm_local() -> Parts:
    return keras_batch_norm()


@case(Adam, lr=0.01, join=TRAIN)
def keras_lstm() -> Parts:
    layers = keras.layers
    model = build(keras.Input((6, 4)), layers.LSTM(12), layers.Dense(3))
    return model, TensorDataset(numbers(6, 4), labels(3)), F.cross_entropy


@case(SGD, lr=0.05, momentum=0.9, join=TRAIN | SYNC)
def keras_convolutions() -> Parts:
    layers = keras.layers
    model = build(
        keras.Input((8, 8, 3)), layers.SeparableConv2D(8, 3, use_bias=False), layers.BatchNormalization(),
        layers.Activation("swish"), layers.GlobalAveragePooling2D(), layers.Dense(5),
    )  # fmt: skip
    return model, TensorDataset(numbers(8, 8, 3), labels(5)), F.cross_entropy
