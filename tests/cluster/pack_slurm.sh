#!/usr/bin/env bash
# Packs this machine's Slurm and munge into FOLDER, for a machine that cannot install packages:
#
#     tests/cluster/pack_slurm.sh FOLDER      # here
#     FOLDER/unpack.sh                        # there, as root
set -euo pipefail
folder=${1:?usage: pack_slurm.sh FOLDER}
PATH=$PATH:/usr/sbin
programs=(slurmctld slurmd slurmstepd srun sbatch salloc scontrol sinfo squeue scancel munged)
plugins=$(dirname "$(find /usr/lib /usr/lib64 -name select_cons_tres.so 2>/dev/null | head -n 1)")
mkdir -p "$folder/root" "$folder/libraries"
for name in "${programs[@]}"; do
    cp -L --parents "$(command -v "$name")" "$folder/root"
done
cp -r --parents "$plugins" "$folder/root"
# All that they link to; what the other machine has of it, it keeps.
find "$folder/root" -type f -exec ldd {} + 2>/dev/null | awk '/=> \// {print $3}' | sort -u |
    grep -vE '/(libc|libm|libdl|libpthread|librt|libresolv|libgcc_s|libstdc\+\+)\.so' |
    xargs -I{} cp -Ln {} "$folder/libraries/"
cat > "$folder/unpack.sh" <<'EOF'
#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cp -r "$here/root/." /
for library in "$here"/libraries/*; do
    ldconfig -p | grep -q "$(basename "$library")" || cp "$library" /usr/local/lib/
done
ldconfig
slurmd -V
EOF
chmod +x "$folder/unpack.sh"
du -sh "$folder"
