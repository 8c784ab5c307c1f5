"""Process that holds pages of a ledger until it is killed. Arguments: NAMESPACE and PAGES."""

from __future__ import annotations

import sys

from kvcached import Device
from lab.gpu_check.kv import CUDA
from lab.gpu_check.sizes import PAGE_BYTES


def main() -> None:
    namespace, pages = sys.argv[1], int(sys.argv[2])
    client = Device.open(CUDA, namespace=namespace).client("first")
    tensor = client.alloc_virtual_tensor(pages * PAGE_BYTES)
    tensor.map(0, pages * PAGE_BYTES)
    print("holding", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
