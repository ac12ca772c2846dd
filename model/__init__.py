"""The Kimi vision towers (MoonViT and MoonViT3d) in PyTorch."""
