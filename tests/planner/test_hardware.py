import pytest

from overland.world.devices import peak_flops


@pytest.mark.parametrize(
    ("driver_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI250X", 191.5),  # one GCD: what PyTorch calls a device
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_of_known_devices(driver_name: str, tflops: float) -> None:
    assert peak_flops(driver_name) == tflops * 1e12
    assert peak_flops(driver_name, "float16") == tflops * 1e12
    assert peak_flops(driver_name.lower()) == tflops * 1e12


@pytest.mark.parametrize("device", ["Intel(R) Xeon(R) Processor", "NVIDIA GeForce RTX 4090", ""])
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert peak_flops(device) is None


def test_a_rate_that_the_table_lacks_is_none_and_not_a_guess() -> None:
    assert peak_flops("NVIDIA H200", "float8") == 1979e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None
    assert peak_flops("NVIDIA H200", "float32") is None
