"""A torch.compile program with several graphs: dynamic shapes, a backward pass, reductions, a graph break.

Prints what it computed, so that a warm start can be compared with a cold one. The argument is a size.
"""

import sys

import torch


@torch.compile(dynamic=True)
def attend(queries, keys):
    scores = (queries @ keys).softmax(-1)
    return torch.relu(scores).sum(-1) * 2 + queries.mean()


@torch.compile
def mix(values):
    return (torch.sin(values) * torch.cos(values) + values**2).cumsum(0)


@torch.compile
def broken(values):
    first = values.tanh() * 3
    torch._dynamo.graph_break()
    return (first - first.mean()).abs().amax(-1)


def main():
    size = int(sys.argv[1])
    torch.manual_seed(0)
    for rows in (size, size + 3, size * 2):
        print(attend(torch.randn(rows, size), torch.randn(size, size)).sum().item().hex())
    print(mix(torch.randn(size, size)).sum().item().hex())
    print(broken(torch.randn(size, 7)).sum().item().hex())
    leaf = torch.randn(size, size, requires_grad=True)
    torch.compile(lambda values: (values.tanh() * values).sum())(leaf).backward()
    print(leaf.grad.sum().item().hex())


if __name__ == "__main__" and "--do-nothing" not in sys.argv:
    main()
