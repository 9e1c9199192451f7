"""How a network computes: attention kernels, compiled blocks, LoRA layers, products of 16 bits."""
