"""Copies of KV pages between GPU and host (SGLang's hierarchical cache): none in the stand-in."""

from __future__ import annotations

from sgl_kernel.missing import missing

transfer_kv_all_layer = missing("kvcacheio.transfer_kv_all_layer")
transfer_kv_all_layer_direct_lf_pf = missing("kvcacheio.transfer_kv_all_layer_direct_lf_pf")
transfer_kv_all_layer_lf_pf = missing("kvcacheio.transfer_kv_all_layer_lf_pf")
transfer_kv_all_layer_lf_ph = missing("kvcacheio.transfer_kv_all_layer_lf_ph")
transfer_kv_all_layer_mla = missing("kvcacheio.transfer_kv_all_layer_mla")
transfer_kv_all_layer_mla_lf_pf = missing("kvcacheio.transfer_kv_all_layer_mla_lf_pf")
transfer_kv_direct = missing("kvcacheio.transfer_kv_direct")
transfer_kv_per_layer = missing("kvcacheio.transfer_kv_per_layer")
transfer_kv_per_layer_direct_pf_lf = missing("kvcacheio.transfer_kv_per_layer_direct_pf_lf")
transfer_kv_per_layer_mla = missing("kvcacheio.transfer_kv_per_layer_mla")
transfer_kv_per_layer_mla_pf_lf = missing("kvcacheio.transfer_kv_per_layer_mla_pf_lf")
transfer_kv_per_layer_pf_lf = missing("kvcacheio.transfer_kv_per_layer_pf_lf")
transfer_kv_per_layer_ph_lf = missing("kvcacheio.transfer_kv_per_layer_ph_lf")
