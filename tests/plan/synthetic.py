"""Made-up operator logs: small passes of several shapes, with forward, backward, in-place ops, views and locals."""

import json
import random
from pathlib import Path
from typing import Any


class LogWriter:
    """Writes a log as DTR's recorder does: every argument is an object of its own, released when it goes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[dict[str, Any]] = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def constant(self, size: int) -> str:
        x = self.name()
        self.lines += [
            {"INSTRUCTION": "CONSTANT", "NAME": x},
            {"INSTRUCTION": "MEMORY", "NAME": x, "MEMORY": str(size)},
        ]
        return x

    def call(self, op: str, time: int, arguments: list[str], *sizes: int, alias: int = -1) -> list[str]:
        results = [self.name() for _ in sizes]
        record = {"INSTRUCTION": "CALL", "NAME": op, "ARGS": arguments, "RESULT": results, "TIME": str(time)}
        self.lines.append(record)
        for x, size in zip(results, sizes, strict=True):
            self.lines += [
                {"INSTRUCTION": "MEMORY", "NAME": x, "MEMORY": str(size)},
                {"INSTRUCTION": "ALIAS", "NAME": x, "ALIAS": str(alias)},
            ]
        return results

    def mutate(self, op: str, time: int, arguments: list[str]) -> None:
        self.lines.append({"INSTRUCTION": "MUTATE", "NAME": op, "ARGS": arguments, "MUTATE": [0], "TIME": str(time)})

    def copy(self, x: str) -> str:
        y = self.name()
        self.lines.append({"INSTRUCTION": "COPY", "SRC": x, "DST": y})
        return y

    def release(self, *names: str) -> None:
        self.lines += [{"INSTRUCTION": "RELEASE", "NAME": x} for x in names]

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path


def network(
    seed: int, *, depth: int = 24, skips: bool = True, inplace: bool = True, annotate: bool = True
) -> LogWriter:
    """A pass: `depth` blocks of a product, a norm with statistics, an activation and sometimes a skip, then backward."""
    log = LogWriter(seed)
    r = log.random
    batch = log.constant(r.randint(500, 2000))
    x = log.copy(batch)
    saved: list[tuple[str, int, list[str], str, int]] = []  # (op, time, saved tensors, parameter, its bytes)
    skip: str | None = None
    size = r.choice((1000, 4000))
    locals_ = []
    for _ in range(depth):
        size = max(100, int(size * r.choice((1.0, 1.0, 1.0, 0.5, 2.0)))) if skips else size
        width = r.randint(10, 80)
        parameter = log.constant(width)
        time = r.randint(200, 3000)
        [y] = log.call("cudnn_convolution", time, [x, parameter], size)
        saved.append(("cudnn_convolution_backward", 2 * time, [log.copy(x)], parameter, width))
        log.release(x)
        [z, mean] = log.call("cudnn_batch_norm", size // 8 + 5, [y], size, 8)
        saved.append(("cudnn_batch_norm_backward", size // 5 + 5, [log.copy(y), mean], parameter, 4))
        log.release(y)
        if inplace:
            log.mutate("relu_", size // 9 + 3, [z])
            a = z
        else:
            [a] = log.call("relu", size // 9 + 3, [z], size)
            log.release(z)
        saved.append(("threshold_backward", size // 9 + 3, [log.copy(a)], "", 0))
        if skips and skip is not None and r.random() < 0.4:
            [b] = log.call("add", size // 9 + 3, [a, skip], size)
            locals_.append(log.copy(b) if r.random() < 0.3 else "")  # a local that lives on and is never read
            log.release(a, skip)
            skip, a = None, b
        if skips and skip is None and r.random() < 0.5:
            skip = log.copy(a)
        [v] = log.call("view", 2, [a], size, alias=0)
        log.release(a)
        x = v
    if skip is not None:
        log.release(skip)
    [loss] = log.call("sum", 10, [x], 8)
    log.release(x)
    if annotate:
        log.lines.append({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"})
    [g] = log.call("ones_like", 3, [loss], 8)
    for op, time, tensors, parameter, width in reversed(saved):
        out = max(size_of(log, tensors[0]), 8)
        if parameter:
            g2, grad = log.call(op, time, [g, *tensors, parameter], out, width)
            del grad  # held to the end
        else:
            [g2] = log.call(op, time, [g, *tensors], out)
        log.release(g, *tensors)
        g = g2
    log.release(g, *(x for x in locals_ if x))
    return log


def size_of(log: LogWriter, x: str) -> int:
    """Bytes of a tensor by name, through copies."""
    source = {line["DST"]: line["SRC"] for line in log.lines if line["INSTRUCTION"] == "COPY"}
    while x in source:
        x = source[x]
    return next(int(line["MEMORY"]) for line in log.lines if line["INSTRUCTION"] == "MEMORY" and line["NAME"] == x)


def tangle(seed: int, *, ops: int = 8) -> LogWriter:
    """A pass with no layers: each op reads one to three of the tensors before it, backward reads some of them in reverse.

    Sizes and times have nothing to do with each other; some ops make two tensors, some are views, some write in place, some
    tensors are let go of early, some gradients are held to the end.
    """
    log = LogWriter(seed)
    r = log.random
    live = [log.constant(r.randint(10, 200)) for _ in range(r.randint(1, 2))]
    done: list[list[str]] = []  # tensors that each op of forward leaves for backward
    for _ in range(ops):
        read = r.sample(live, min(len(live), r.choice((1, 1, 2, 3))))
        kind = r.random()
        if kind < 0.1:
            made = log.call("view", 1, read[:1], 0, alias=0)
        elif kind < 0.2 and done:
            inner = r.choice(done)[0]
            log.mutate("relu_", r.randint(5, 300), [inner])
            continue
        else:
            sizes = [r.choice((100, 300, 1000, 3000)) for _ in range(r.choice((1, 1, 1, 2)))]
            made = log.call("f", r.randint(5, 3000), read, *sizes)
        live.append(made[0])
        done.append([made[0], *made[1:]])
    log.lines.append({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"})
    [g] = log.call("loss", 10, [live[-1]], 8)
    for made in reversed(done):
        grads = log.call(
            "b", r.randint(5, 4000), [g, *made], r.choice((8, 300, 1000)), *([50] if r.random() < 0.3 else [])
        )
        log.release(g, *(x for x in made if r.random() < 0.9))
        g = grads[0]
    return log


class Tape:
    """A log of a program that takes gradients, gradients of gradients too: the record of an autograd. Every tensor
    stays until `backward` has come back to it, as with `create_graph=True`."""

    def __init__(self, log: LogWriter) -> None:
        self.log = log
        self.size: dict[str, int] = {}
        self.made: list[tuple[str, str, int, tuple[str, ...]]] = []  # result, op, time, arguments
        self.needs: set[str] = set()  # depends on something that a gradient is asked for

    def constant(self, size: int, *, gradient: bool = True) -> str:
        x = self.log.constant(size)
        self.size[x] = size
        if gradient:
            self.needs.add(x)
        return x

    def run(self, op: str, time: int, arguments: tuple[str, ...], size: int) -> str:
        [y] = self.log.call(op, time, list(arguments), size)
        self.size[y] = size
        self.made.append((y, op, time, arguments))
        if self.needs.intersection(arguments):
            self.needs.add(y)
        return y

    def gradients(self, loss: str, wanted: list[str], *, first: int = 0, last: bool = False) -> dict[str, str]:
        """The gradient of `loss` by each of `wanted`, through tensors made from the entry `first` on. With `last` the
        graph is released on the way, and so is every gradient that is not wanted."""
        made = self.made[first:]
        leads = set(wanted)  # to one of them
        for y, _, _, arguments in made:
            if leads.intersection(arguments):
                leads.add(y)
        of = {loss: self.run("ones_like", 3, (loss,), self.size[loss])}
        for y, op, time, arguments in reversed(made):
            if y in of and y in leads:
                g = of[y] if y in wanted else of.pop(y)
                for i in dict.fromkeys(x for x in arguments if x in leads and x in self.needs):
                    part = self.run(f"{op}_backward", time, (g, *dict.fromkeys(arguments)), self.size[i])
                    if i in of:
                        total = self.run("add", self.size[i] // 9 + 3, (of[i], part), self.size[i])
                        if last:
                            self.log.release(of[i], part)
                        part = total
                    of[i] = part
                if last and y not in wanted:
                    self.log.release(g)
            if last and y not in wanted:
                self.log.release(y)
        return {x: of[x] for x in wanted if x in of}


def unrolled_gan(seed: int, *, steps: int = 8, depth: int = 4, batch: int = 24) -> LogWriter:
    """A generator that is trained through `steps` steps of its discriminator, each of which takes gradients itself.

    The discriminator's gradients and parameters of every step are read again when backward comes back to that step, so they
    live as long as activations do. All of it is very many small storages, and no op needs more than a few.
    """
    log = LogWriter(seed)
    r, tape = log.random, Tape(log)

    def layers() -> list[str]:
        return [tape.constant(4 * r.choice((24, 32, 48)) * r.choice((8, 12))) for _ in range(depth)]

    def network(x: str, parameters: list[str]) -> str:
        for parameter in parameters:
            width = 4 * batch * r.choice((24, 32, 48))
            y = tape.run("mm", (tape.size[x] + tape.size[parameter]) // 4 + 20, (x, parameter), width)
            x = tape.run("tanh", width // 9 + 3, (y,), width)
        return x

    def loss_of(*outputs: str) -> str:
        parts = [tape.run("binary_cross_entropy", 20, (x,), 8) for x in outputs]
        return tape.run("add", 3, tuple(parts), 8) if len(parts) > 1 else parts[0]

    generator, discriminator = layers(), layers()
    momenta = [tape.constant(tape.size[p], gradient=False) for p in discriminator]
    noise = tape.constant(4 * batch * 16, gradient=False)
    real = tape.constant(4 * batch * 32, gradient=False)
    for _ in range(steps):
        first = len(tape.made)
        fake = network(noise, generator)
        loss = loss_of(network(real, discriminator), network(fake, discriminator))
        gradient = tape.gradients(loss, discriminator, first=first)
        for i, p in enumerate(discriminator):
            time = tape.size[p] // 9 + 3
            momenta[i] = tape.run("momentum", time, (momenta[i], gradient[p]), tape.size[p])
            discriminator[i] = tape.run("step", time, (p, momenta[i]), tape.size[p])
    loss = loss_of(network(network(noise, generator), discriminator))
    log.lines.append({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"})
    tape.gradients(loss, generator, last=True)
    return log
