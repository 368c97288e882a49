"""PyTorch's fused AdamW, measured when told to: `torch.py DEVICE ELEMENTS UPDATES`.

Each line read is a number of threads; the line printed for it is the rate in GB/s of as many updates of one float32 parameter,
28 bytes an element each.
"""

import sys
import time

device, elements, updates = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def settle():
    if device != "cpu":
        torch.cuda.synchronize()


def measure():
    settle()
    start = time.perf_counter()
    for _ in range(updates):
        optimizer.step()
    settle()
    return 28 * elements * updates / (time.perf_counter() - start) / 1e9


try:
    import torch

    weight = torch.nn.Parameter(torch.linspace(-1, 1, elements, device=device))
    weight.grad = torch.linspace(1, -1, elements, device=device)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01, fused=True)
    measure()
except Exception as error:  # noqa: BLE001
    print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
    sys.exit(1)
print(f"ready torch {torch.__version__}, fused AdamW", flush=True)
for line in sys.stdin:
    torch.set_num_threads(int(line))
    print(measure(), flush=True)
