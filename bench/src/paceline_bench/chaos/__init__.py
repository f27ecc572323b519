"""Real processes on real nodes, on which faults strike while they train: what each fault costs, and what it breaks.

machines    nodes as network namespaces, reached over ssh as a user's are
training    what every node runs; each process keeps a journal of what it computed, and when
faults      what may strike, and how it is taken back
ordeal      one training, struck until it ends; where it was lost, it is started again from its checkpoint
many        as many of these as so many faults need
laws        what the journals must say in the end
tally       one line for each class of fault, and the record
killed      the same loss of a node under others: torchrun with checkpoints (ddp), Horovod elastic (hvd)
"""
