"""`tessera.attention` where JAX traces: jit, grad, vmap, scan, checkpoint. `tessera.arrays` comes here with tracers."""
