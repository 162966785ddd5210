"""triton: attention for GPUs, forward and backward, in Triton.

``functional`` is what users call, ``launch`` sets up a launch, ``forward``, ``backward`` and
``bias_gradient`` hold the kernels, ``scores`` what they share, ``tiles`` the tile sizes, ``compiled``
their compilation without a device, and ``candidate`` the kernel as this package judges it.
Importing this package imports neither torch nor triton.
"""
