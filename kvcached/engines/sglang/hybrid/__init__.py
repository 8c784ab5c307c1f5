"""SGLang's models with several pools: for full attention, sliding windows, and states."""
