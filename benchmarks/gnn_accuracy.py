"""What gnn_pyg.py and gnn_dgl.py share: a loader's arms train GraphSAGE to an accuracy, each on the same batches.

The graph, the model and the features are those of gnn.py: Cora's rows and dense FP32 rows, for 2.4 million nodes. The
label of a node is the largest of CLASSES random linear functions of its features. A batch has 1,024 seeds. The clock of
an arm begins with its first batch, whose rows are compared bit for bit. The accuracy of a batch is measured before the
model learns from it. It counts as reached when EVERY batches in a row have ACCURACY in the mean.

After the common columns, the CSV has batch (seeds), batches (trained), batch_ms (their mean, the loader included),
accuracy (of the last EVERY batches), accuracy_s (seconds until it was reached, empty if it was not), loss_difference
(the largest difference of a loss from that of the case's first arm, relative; 0 if all have the same bits), table_gib
(of raw rows), workers (processes that draw neighbours) and the version of the loader's package. `gbps` is the features
of all batches over the time of training.
"""

import itertools
import os
import shutil
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import gnn, harness, ideal

COLUMNS = "batch,batches,batch_ms,accuracy,accuracy_s,loss_difference,table_gib,workers".split(",")
CLASSES, ACCURACY, EVERY, LEARNING_RATE = 8, 0.8, 5, 1e-2
MOST_BATCHES, QUICK_BATCHES, LIMIT_S, MOST_WORKERS = 300, 5, 45.0, 12
SHARED, WORKER_BYTES = "/dev/shm", 64 << 20  # A worker hands over batches in this folder, which takes less.
QUICK_CASES = (gnn.Case("pubmed", 2_000, (32,)), gnn.Case("dense 100", 2_000, (32,), torch.bfloat16, 100))
RAW, IBP = "raw rows", "ibp"


class Ready(NamedTuple):
    """A batch that is on the device. ids: its nodes, whose features are x. hops: as `gnn.Sage` takes them. labels: of
    its seeds."""

    x: torch.Tensor
    hops: list[tuple[torch.Tensor, torch.Tensor]]
    labels: torch.Tensor
    ids: torch.Tensor


class Trained(NamedTuple):
    """What training came to. seconds: of all batches. accuracy_s: seconds until the accuracy was reached, or None."""

    seconds: float
    rows: int
    losses: torch.Tensor
    accuracy: float
    accuracy_s: float | None


def num_workers():
    room = shutil.disk_usage(SHARED).free // WORKER_BYTES
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2, room)


class Training:
    """Features and labels of nodes. Every arm trains a new model. A subclass has `batches(arm)`, an iterator over the
    arm's batches, each of them a `Ready`."""

    def __init__(self, run, case, features):
        self.run, self.case, self.features = run, case, features
        generator = torch.Generator(run.device).manual_seed(1)
        source = features.source.float()
        classes = (source @ torch.randn(source.shape[1], CLASSES, generator=generator, device=run.device)).argmax(1)
        self.labels = classes[features.of_node.long()].cpu()
        self.device = torch.device("cuda", torch.cuda.current_device()) if run.on_gpu else run.device

    def train(self, arm):
        """Trains until the accuracy is reached, or MOST_BATCHES or LIMIT_S are over. The clock begins when the first
        batch is there."""
        torch.manual_seed(0)
        model = gnn.Sage(self.features.x.shape[1]).to(self.device, self.case.dtype)
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=self.run.on_gpu)
        losses, rights, rows, reached = [], [], 0, None
        most = QUICK_BATCHES if self.run.quick else MOST_BATCHES
        batches = self.batches(arm)
        first = next(batches)
        self.features.check(first.x, first.ids.to(self.device), f"{self.case.name}, {arm}")
        self.run.sync()
        began = time.perf_counter()
        for number, batch in enumerate(itertools.chain([first], batches), 1):
            logits = model(batch.x, batch.hops).float()
            loss = F.cross_entropy(logits, batch.labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            rights.append((logits.argmax(1) == batch.labels).float().mean())
            rows += len(batch.ids)
            if number % EVERY:
                continue
            accuracy = torch.stack(rights[-EVERY:]).mean().item()  # The host waits for the GPU here.
            seconds = time.perf_counter() - began
            reached = seconds if accuracy >= ACCURACY else None
            if reached or number >= most or seconds > LIMIT_S:
                break
        return Trained(seconds, rows, torch.stack(losses[:number]).cpu(), accuracy, reached)


def difference(losses, others):
    """Returns the largest relative difference of the losses that both have, 0 if they have the same bits."""
    count = min(len(losses), len(others))
    return ((losses[:count] - others[:count]).abs() / others[:count].abs()).max().item()


def measure(training, arms, by_cpu, suffix="", **columns):
    """Trains by each of the arms, and records what each came to. by_cpu: arms whose rows the CPU gathers. suffix: the
    end of the case's name. columns: further ones."""
    run, case, features, first = training.run, training.case, training.features, None
    for arm in arms:
        with run.cell(f"{case.name}{suffix}, {arm}"):
            trained = training.train(arm)
            first, count = first or trained, len(trained.losses)
            savings = features.table.savings if arm == IBP else 0.0
            run.add(
                case=f"{case.name}, batch {case.batches[0]}{suffix}",
                arm=arm,
                rows=trained.rows // count,
                row_bytes=features.row_bytes,
                dtype=case.dtype,
                savings=savings,
                gbps=trained.rows * features.row_bytes * 1e-9 / trained.seconds,
                ideal_gbps=ideal.LINK_COPY_GBPS / (1 - savings),
                sms=0 if arm in by_cpu else None,
                batch=case.batches[0],
                batches=count,
                batch_ms=harness.four_digits(1e3 * trained.seconds / count),
                accuracy=f"{trained.accuracy:.4f}",
                accuracy_s="" if trained.accuracy_s is None else harness.four_digits(trained.accuracy_s),
                loss_difference=f"{difference(trained.losses, first.losses):.2g}",
                table_gib=f"{features.num_bytes / gnn.GIB:.2f}",
                **columns,
            )


def main(name, argv, description, package, make_loaders, measure_case):
    """Runs a script. make_loaders(graph, batch_size, workers, device) returns loaders whose workers have begun.
    measure_case(run, case, features, loaders, workers) trains by all arms. package: the column of its version."""
    args = harness.parse_args(argv, description)
    on_gpu = args.device == "cuda"
    small = args.quick or not on_gpu
    cases = QUICK_CASES if small else gnn.DGL_CASES
    torch.manual_seed(0)
    graph = gnn.Graph(cases[0].num_nodes, gnn.QUICK_EDGES if small else gnn.NUM_EDGES, torch.device("cpu"))
    workers, device = num_workers() if on_gpu else 0, torch.device("cuda:0" if on_gpu else "cpu")
    loaders = make_loaders(graph, cases[0].batches[0], workers, device)
    run = harness.Run(name, args, [*COLUMNS, package])
    torch.manual_seed(0)
    for case in cases:
        with run.cell(case.name):
            measure_case(run, case, gnn.Features(case, args.data, run.device), loaders, workers)
        harness.release(run)
    return run.finish()
