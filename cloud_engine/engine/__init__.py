"""The engine core: scheduler, paged KV cache, runner, sampler and speculation."""
