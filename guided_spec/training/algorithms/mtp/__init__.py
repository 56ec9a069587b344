"""Multi-token prediction modules, in the layouts of DeepSeek, GLM and Qwen."""
