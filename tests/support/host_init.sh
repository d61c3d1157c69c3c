#!/bin/bash
# The first process of a machine of the lab (hosts.py), within namespaces of its own: makes its file system, which is
# this machine's with changes that are its own, and becomes systemd.
#   host_init.sh NAME SCRATCH BUNDLE HIDDEN...
set -eu
name=$1 scratch=$2 bundle=$3
shift 3

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$scratch"
mkdir "$scratch"/{changes,work,root}
mount -t overlay -o "lowerdir=/,upperdir=$scratch/changes,workdir=$scratch/work" overlay "$scratch/root"
cd "$scratch/root"

# What a kit leaves on a machine is not here before; nor is what the kit was built with.
rm -rf etc/baru opt/baru var/lib/baru
mkdir -p media/kit
mount --bind -o ro "$bundle" media/kit
for folder in "$@" /tmp /run; do
    [ ! -d "./$folder" ] || mount -t tmpfs tmpfs "./$folder"
done

# The kernel is everybody's: what systemd finds read-only it leaves alone.
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd
mkdir dev/shm
ip link set lo up
hostname "$name"
echo "$name" >etc/hostname

# Nothing of this machine's own services runs there.
rm -rf etc/systemd/system etc/init.d
mkdir -p etc/systemd/system
pivot_root . mnt
umount -l /mnt
exec env -i container=baru PATH="$PATH" /lib/systemd/systemd --system --unit=multi-user.target
