"""Link `nccl` where there is no GPU: a second gloo group stands in for NCCL's, and large tensors for those of a GPU."""

import torch.distributed as dist

from paceline.link import gloo as plain
from paceline.link import nccl
from paceline.link.net.works import Patient

LARGE = 64  # values


class Twin(nccl.Link):
    """Everything but NCCL itself: which group takes what, how it is waited for, what becomes of it after a loss."""

    @staticmethod
    def check():
        pass

    def _connect(self, store):
        group = super()._connect(store)
        group.on_device = lambda tensor: tensor.numel() > LARGE
        group.device = group.make()  # to make NCCL's, nobody has to wait for the others; for gloo's, all do
        return group

    def _device_group(self, store):
        return Device(plain.Link._connect(self, dist.PrefixStore("twin", store)))


class Device:
    """Gloo tells of a send or receive that it has ended only to who waits for it; NCCL tells everybody."""

    def __init__(self, group):
        self.group, self.calls, self.aborted = group, [], False

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            work = getattr(self.group, name)(*args)
            return Mail(Patient(work)) if name in ("send", "recv") else work

        return call

    def abort(self):
        self.aborted = True


class Mail:
    def __init__(self, patient):
        self.patient, self.is_completed = patient, patient.is_completed

    def wait(self):
        if self.patient.error:
            raise self.patient.error
